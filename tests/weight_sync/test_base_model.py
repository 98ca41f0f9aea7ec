"""Engines merge adapters only into the weights that they were trained on."""

import pytest
import torch
from safetensors.torch import save_file

from weight_sync.base_model import base_folder, fingerprint_of_weights
from weight_sync.errors import LoadFailed


def write(folder, value):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((64, 64), value)}, folder / "model.safetensors")
    return str(folder)


def test_a_folder_is_accepted_by_its_weights_and_another_is_refused(tmp_path) -> None:
    base, copy, other = (
        write(tmp_path / name, v) for name, v in (("a", 1.0), ("b", 1.0), ("c", 2.0))
    )
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    known = fingerprint_of_weights(base)
    assert str(base_folder(copy, known)) == copy
    assert str(base_folder(other, "")) == other
    with pytest.raises(LoadFailed, match="has other weights than those that the learner's adapter"):
        base_folder(other, known)
    write(tmp_path / "b", 3.0)
    with pytest.raises(LoadFailed, match="put them back"):
        base_folder(copy, known)


def test_a_hub_name_stands_for_the_snapshot_here(tmp_path, monkeypatch) -> None:
    folder = write(tmp_path / "snapshot", 1.0)
    asked = []

    def snapshot_download(name, *, local_files_only):
        asked.append((name, local_files_only))
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    known = fingerprint_of_weights("organisation/name")
    assert known == fingerprint_of_weights(folder)
    assert str(base_folder("organisation/name", known)) == folder
    assert set(asked) == {("organisation/name", True)}


@pytest.mark.parametrize("name", ["organisation/not-fetched", "/nowhere/model"])
def test_weights_that_are_not_here_have_no_fingerprint_and_take_no_adapter(
    tmp_path, monkeypatch, name
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint_of_weights(name) == ""
    with pytest.raises(LoadFailed, match="are not here"):
        base_folder(name, "")
