"""No rank of several ever holds a whole model under ZeRO 3."""

import pytest
from held_weights import measure, score_by_reference
from rank_processes import spawn

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

PHASES = {"load", "loaded", "check", "train", "publish", "save"}


def test_two_ranks_hold_little_more_than_half_a_model_each_from_load_to_export(
    tmp_path, build_model, record_property
):
    for rank, shares in enumerate(spawn(2, measure, build_model(layers=6), str(tmp_path))):
        record_property(f"rank_{rank}", shares)
        assert shares.keys() == (PHASES if rank == 0 else PHASES - {"save"})
        copied = shares.pop("save", 0.0) - shares["loaded"]
        assert max(shares.values()) <= 0.6, shares
        assert copied <= 1.0 + 3 * 0.6, "the model, and this rank's part of weights and moments"
    assert (tmp_path / ".v000001.tmp" / "model.safetensors.index.json").exists()


def test_ranks_share_the_reference_too_and_it_scores_as_a_whole_one(build_model, record_property):
    models = [build_model(layers=6, seed=seed) for seed in (0, 1)]
    for rank, found in enumerate(spawn(2, score_by_reference, *models)):
        record_property(f"rank_{rank}", found["share"])
        assert found["share"] <= 0.6
        whole, parts = found["figures"][1], found["figures"][3]
        assert whole["reference_kl"] > 0.01
        assert parts == pytest.approx(whole, rel=1e-6)
