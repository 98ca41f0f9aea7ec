"""Weights that a fleet of actors publishes: of one file, of several, and of the hub."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.harness import actor_fleet


@pytest.mark.parametrize("model", ["folder", "organisation/name"])
def test_the_weights_of_a_model_are_those_of_all_its_files(model, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "ab":
        save_file({name: torch.ones(1)}, folder / f"model-{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actor_fleet, "snapshot_download", {"organisation/name": folder}.get)
    assert sorted(actor_fleet.load_weights(Path(model))) == ["a", "b"]
