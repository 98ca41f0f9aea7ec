"""Checkpoints appear whole or not at all."""

import json

import pytest

from learner.checkpoint import checkpoint_path, save_checkpoint


class Engine:
    def __init__(self, *, fail=False):
        self.fail = fail

    def save_model(self, folder):
        (folder / "model.safetensors").write_text("weights")

    def save_optimizer(self, folder):
        folder.mkdir()
        (folder / "moments").write_text("moments")
        if self.fail:
            raise OSError("No space left on device")


def test_a_checkpoint_holds_the_engine_and_the_state(tmp_path):
    folder = save_checkpoint(Engine(), tmp_path, 60, {"advantage_state": {"ema": 0.5}})
    assert folder == checkpoint_path(tmp_path, 60) == tmp_path / "v000060"
    assert (folder / "model.safetensors").read_text() == "weights"
    assert (folder / "optimizer" / "moments").read_text() == "moments"
    state = json.loads((folder / "state.json").read_text())
    assert state == {"version": 60, "advantage_state": {"ema": 0.5}}


def test_a_failed_save_leaves_no_checkpoint_and_the_next_one_succeeds(tmp_path):
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(Engine(fail=True), tmp_path, 5, {})
    assert not checkpoint_path(tmp_path, 5).exists()
    save_checkpoint(Engine(), tmp_path, 5, {})
    assert [path.name for path in tmp_path.iterdir()] == ["v000005"]


def test_the_same_version_is_replaced(tmp_path):
    save_checkpoint(Engine(), tmp_path, 5, {"round": 1})
    folder = save_checkpoint(Engine(), tmp_path, 5, {"round": 2})
    assert json.loads((folder / "state.json").read_text())["round"] == 2
