"""No rank of several ever holds a whole model under ZeRO 3."""

import json

import pytest
from held_weights import measure
from rank_processes import spawn

from learner.config.learner import TinyModelConfig
from learner.model.policy import build_tiny

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

PHASES = {"load", "loaded", "check", "train", "publish", "save"}


def test_two_ranks_hold_little_more_than_half_a_model_each_from_load_to_export(
    tmp_path, record_property
):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "heads": 2, "head_dim": 16, "layers": 6}
    model = tmp_path / "model"
    build_tiny(TinyModelConfig(characters="0123456789+=", **sizes), model, seed=3)
    spawn(2, measure, str(model), str(tmp_path))
    for rank in (0, 1):
        shares = json.loads((tmp_path / f"{rank}.json").read_text())
        record_property(f"rank_{rank}", shares)
        assert shares.keys() == (PHASES if rank == 0 else PHASES - {"save"})
        assert max(shares.values()) <= 0.6, shares
    assert (tmp_path / ".v000001.tmp" / "model.safetensors.index.json").exists()
