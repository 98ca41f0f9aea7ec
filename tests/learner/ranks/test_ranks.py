"""Several ranks are one learner: same gradient, and exact checkpoints, at every ZeRO stage."""

import pytest
import torch
from rank_processes import (
    BUDGETS,
    COMBINATIONS,
    STAGES,
    by_ranks,
    filled,
    go_on,
    gradients,
    load_rank,
    muon_weights,
    one_diverges,
    plain,
    probed,
    resumed,
    save,
    spawn,
    summed_dtypes,
    unpacked,
    with_models,
    within_nodes,
    without_tokens,
)
from rollouts import random_groups

from learner.config.learner import LearnerConfig
from learner.engine import checkpoint
from learner.ranks.rank import Rank
from learner.ranks.spec import EarlierSession, LearnerSpec
from queues.schema import encode

pytestmark = pytest.mark.deepspeed

OBJECTIVES = {
    "reference": {"kl": {"coefficient": 0.3}},
    "reward": {"advantage": "rloo", "kl": {"coefficient": 0.3, "placement": "reward"}},
    "critic": {"advantage": "gae", "loss": "ppo", "critic": {}, "positive_nll": 0.1},
    "shared": {"advantage": "gae", "loss": "dapo", "critic": {"shared": True}},
    "entropy": {"entropy": {"coefficient": 0.1}, "aggregation": "prompt_mean"},
    "pairs": {"advantage": "best_worst", "loss": "dpo", "aggregation": "sequence_mean"},
    "decoupled": {"loss": "decoupled_ppo", "drop_tied": True},
    "whitened": {"advantage": "reinforce_pp", "loss": "sapo"},
    "sequences": {
        "advantage": "batch_norm",
        "loss": "gspo",
        "loss_options": {"clip_low": 0.5, "clip_high": 5.0},
        "aggregation": "sequence_mean",
    },
}
LAYOUTS = [(0, 10_000), (1, 16), (3, 40)]
"""ZeRO stages and budgets of microbatches that objectives are computed with."""


@pytest.fixture(scope="module")
def measured(model_path):
    """Gradients and statistics by number of ranks, ZeRO stage and micro-batch budget."""
    layouts = [(stage, budget) for stage in STAGES for budget in BUDGETS]
    return by_ranks(gradients, model_path, {"": {}}, layouts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_loss_and_gradient_do_not_depend_on_ranks_zero_stage_and_micro_batches(
    measured, ranks, stage, budget, record_property
):
    [reference], expected, _ = measured[1, "", 0, max(BUDGETS)]
    [gradient], found, _ = measured[ranks, "", stage, budget]
    difference = float((gradient - reference).norm() / reference.norm())
    record_property("relative_difference", difference)
    assert difference < 1e-6
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-7)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    for name in ("ess", "entropy_mean", "mismatch_fresh", "kl_fresh"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    for name in ("tokens_trained", "rollouts_trained", "lag_histogram", "tokens_fresh"):
        assert found[name] == expected[name], name
    assert 1 <= found["rank_imbalance"] < 1.2
    assert found["overlaps"] == (stage == 3 or (stage == 2 and ranks == 2)), "sums with the pass"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_probe_scores_the_version_that_is_published_at_temperature_1(model_path, ranks):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    for scores, sequences, weights in spawn(ranks, probed, model_path).values():
        model.load_state_dict(weights, strict=False)
        expected = []
        for sequence in sequences:
            logits = model(torch.tensor([sequence])).logits[0, :-1].detach()
            targets = torch.tensor(sequence)[1:, None]
            expected += logits.log_softmax(-1).gather(1, targets)[:, 0].tolist()
        assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("way", ["BESIDE", "ALONE"])
def test_sequences_that_are_not_packed_have_the_same_gradient(measured, model_path, way):
    """With ranks that have other numbers of sequences, and gather weights together."""
    [reference], *_ = measured[1, "", 0, max(BUDGETS)]
    for (gradient,), *_ in by_ranks(unpacked, model_path, way, [(1, 40), (3, 40)]).values():
        assert float((gradient - reference).norm() / reference.norm()) < 1e-6


@pytest.mark.slow
def test_weights_that_are_shared_out_within_nodes_too_train_and_resume_the_same(
    model_path, tmp_path
):
    found = spawn(4, within_nodes, model_path, str(tmp_path))
    gradient, weights = found[False, "straight"]
    for case in ((True, "straight"), (False, "resumed"), (True, "resumed")):
        for values, expected in zip(found[case], (gradient, weights), strict=True):
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-7)
    assert (found[False, "sizes"], found[True, "sizes"]) == ([4], [2, 4])


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_over_ranks_in_float32(model_path):
    crossed = spawn(2, summed_dtypes, model_path)
    assert crossed.keys() == {1, 2, 3}
    for dtypes in crossed.values():  # statistics are in float64
        assert "torch.float32" in dtypes
        assert "torch.bfloat16" not in dtypes


def test_a_loss_that_is_not_finite_on_one_rank_fails_the_step_of_all(model_path):
    for errors in spawn(2, one_diverges, model_path):
        assert errors.keys() == {*STAGES}
        for text in errors.values():
            assert "gradient norm is" in text
            assert "at optimizer step 0" in text


@pytest.mark.slow
def test_ranks_agree_on_a_batch_without_a_token_and_on_one_that_only_one_rank_has_tokens_of(
    model_path,
):
    results = by_ranks(without_tokens, model_path)
    reference, _ = results[1, 0]
    for layout, (weights, steps) in results.items():
        assert steps == [1, 0, 1, 1], layout
        torch.testing.assert_close(weights, reference, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_muon_takes_the_same_steps_with_one_rank_and_two(model_path):
    found = by_ranks(muon_weights, model_path)
    for (ranks, _), weights in found.items():
        # Orthogonalising in few bits spreads the rounding of the sum over ranks.
        torch.testing.assert_close(weights, found[1, 0], rtol=0, atol=2e-3)
        assert torch.equal(weights, found[ranks, 0]), "the ZeRO stage changes nothing"


def same_in_both(straight, again):
    """Require that training on from a checkpoint is training without interruption."""
    for name in ("statistics", "draws", "steps"):
        assert again[name] == straight[name]
    assert again["weights"].keys() == straight["weights"].keys()
    for name, tensor in straight["weights"].items():
        assert torch.equal(again["weights"][name], tensor), name


@pytest.fixture(scope="module", params=[1, 2])
def interrupted(model_path, tmp_path_factory, request):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return spawn(request.param, resumed, model_path, folder, plain, COMBINATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), COMBINATIONS)
def test_training_on_from_a_checkpoint_is_bit_for_bit_training_without_interruption(
    interrupted, stage, dtype
):
    straight, again = interrupted[stage, dtype]
    same_in_both(straight, again)
    assert straight["steps"] == 8


@pytest.mark.slow
def test_ranks_whose_disk_fills_up_within_a_checkpoint_wait_for_room_and_go_on(
    model_path, mount_disk
):
    small_disk = mount_disk("32m")
    [results] = spawn(2, filled, model_path, str(small_disk)).values()
    assert list(small_disk.glob("waited-*"))
    assert not list(small_disk.rglob(".v*"))
    same_in_both(*results)


@pytest.fixture(scope="module")
def by_objective(model_path):
    """Gradients and statistics by number of ranks, objective, ZeRO stage and budget."""
    return by_ranks(gradients, model_path, OBJECTIVES, LAYOUTS, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_kind_of_objective_has_one_gradient(
    by_objective, objective, layout, ranks, record_property
):
    references, expected, _ = by_objective[1, objective, *LAYOUTS[0]]
    captured, found, _ = by_objective[ranks, objective, *layout]
    assert len(captured) == (2 if objective == "critic" else 1)
    for gradient, reference in zip(captured, references, strict=True):
        assert reference.norm() > 0
        difference = float((gradient - reference).norm() / reference.norm())
        record_property("relative_difference", difference)
        assert difference < 1e-6
    for name in ("loss", "policy_loss", "reference_kl", "value_loss", "explained_variance"):
        if name in expected:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert found["fractions"] == pytest.approx(expected["fractions"])


@pytest.mark.slow
def test_distillation_has_one_gradient_with_teachers_of_other_sizes(model_path, build_model):
    far = {"initializer_range": 0.3}
    teachers = build_model(seed=5, layers=1, **far), build_model(seed=6, hidden_size=16, **far)
    named = [{"path": path, "weight": weight} for path, weight in zip("ab", (1, 3), strict=True)]
    objectives = {
        "likeliest": {"distillation": {"teachers": named, "top_k": 4}},
        "whole": {"distillation": {"teachers": named, "top_k": 99, "divergence": "jsd"}},
        "sampled": {"distillation": {"teachers": named, "top_k": 0, "policy_loss": 0.0}},
    }
    found = by_ranks(gradients, model_path, objectives, LAYOUTS, 1, teachers)
    for (_, name, *_), ([gradient], figures, _) in found.items():
        [reference], expected, _ = found[1, name, *LAYOUTS[0]]
        assert float((gradient - reference).norm() / reference.norm()) < 1e-6
        for figure in ("loss", "teacher_divergence"):
            assert figures[figure] == pytest.approx(expected[figure], rel=1e-5, abs=1e-6)
        assert min(expected["teacher_divergence"].values()) > 1e-2


@pytest.fixture(scope="module", params=[1, 2])
def interrupted_with_models(model_path, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("models")
    layouts = [(stage, "float32") for stage in STAGES]
    return folder, spawn(request.param, resumed, model_path, str(folder), with_models, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_critic_reference_and_coefficients_go_on_bit_for_bit(interrupted_with_models, stage):
    same_in_both(*interrupted_with_models[1][stage, "float32"])


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "stage"), [(2, 0), (0, 2), (2, 1)])
def test_they_go_on_in_another_layout_the_same_to_rounding(
    model_path, interrupted_with_models, saved, stage
):
    folder, results = interrupted_with_models
    path = checkpoint.checkpoint_path(folder / f"{saved}-float32", 2)
    config = with_models(zero_stage=stage, dtype="float32")
    straight, _ = results[saved, "float32"]
    again = go_on(load_rank(model_path, config, str(path)), range(2, 4))
    for found, expected in zip(again["statistics"], straight["statistics"], strict=True):
        for name in ("loss", "reference_kl", "value_loss", "kl_coefficient", "learning_rate"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    for name, tensor in straight["weights"].items():
        torch.testing.assert_close(again["weights"][name], tensor, rtol=0, atol=2e-5)


OTHER_STEPS = {
    "learning_rate": 5e-3,
    "gradient_clipping": 0.01,
    "schedule": {"kind": "linear", "warmup_steps": 1},
    "critic": {"learning_rate": 5e-3, "gradient_clipping": 0.02},
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_batches_of_an_earlier_session_are_trained_again_with_its_settings(
    model_path, tmp_path, stage
):
    critic = {"learning_rate": 1e-3, "pretrain_batches": 1}
    settings = {"zero_stage": stage, "learning_rate": 1e-3, "advantage": "gae", "critic": critic}
    before = LearnerConfig(**settings)
    after = LearnerConfig(**settings | OTHER_STEPS | {"critic": critic | OTHER_STEPS["critic"]})
    shared = {"model_path": model_path, "seed": 0}

    rank = Rank(LearnerSpec(config=before, steps=4, **shared))
    trained = weights_after(rank, [0, 1])
    saved = save(rank, tmp_path)
    rank.close()

    earlier = EarlierSession(2, after.stepping_as(before), 4)
    rank = Rank(LearnerSpec(config=after, steps=9, earlier=(earlier,), **shared))
    assert same(weights_after(rank, [0, 1]), trained)
    again = weights_after(rank, [2])
    rank.close()
    for config, steps, equal in ((after, 9, True), (before, 4, False)):
        rank = Rank(LearnerSpec(config=config, steps=steps, checkpoint=str(saved), **shared))
        assert same(weights_after(rank, [2]), again) == equal
        rank.close()


def weights_after(rank, versions):
    """Train the batches of versions; return the weights of policy and critic."""
    for version in versions:
        groups = random_groups(seed=version, version=version)
        rank.update([encode(group) for group in groups], version)
    return [tensor.clone() for _, tensor in (*rank.engine.weights(), *rank.critic.weights())]


def same(left, right):
    return all(map(torch.equal, left, right))
