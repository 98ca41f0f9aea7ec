"""Several ranks are one learner: same gradient, and exact checkpoints, at every ZeRO stage."""

import pytest
import torch
from rank_processes import (
    BUDGETS,
    COMBINATIONS,
    OBJECTIVES,
    filled,
    go_on,
    gradients,
    muon_weights,
    objectives,
    one_diverges,
    resumed,
    resumed_with_models,
    spawn,
    summed_dtypes,
    with_models,
    without_tokens,
)
from rollouts import random_groups

from learner.config.learner import LearnerConfig
from learner.engine import checkpoint
from learner.ranks.rank import Rank
from learner.ranks.spec import EarlierSession, LearnerSpec
from queues.schema import encode

pytestmark = pytest.mark.deepspeed


def by_ranks(work, model_path, tmp_path_factory):
    """Run `work` on one rank and on two; return what it writes, by number of ranks and key."""
    results = {}
    for ranks in (1, 2):
        file = tmp_path_factory.mktemp("ranks") / "results.pt"
        spawn(ranks, work, model_path, str(file))
        for key, value in torch.load(file, weights_only=True).items():
            results[ranks, *key] = value
    return results


@pytest.fixture(scope="module")
def measured(model_path, tmp_path_factory):
    """Gradients and statistics by number of ranks, ZeRO stage and micro-batch budget."""
    return by_ranks(gradients, model_path, tmp_path_factory)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("budget", BUDGETS)
def test_loss_and_gradient_do_not_depend_on_ranks_zero_stage_and_micro_batches(
    measured, ranks, stage, budget, record_property
):
    reference, expected = measured[1, 0, max(BUDGETS)]
    gradient, found = measured[ranks, stage, budget]
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


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_over_ranks_in_float32(model_path, tmp_path):
    spawn(2, summed_dtypes, model_path, str(tmp_path / "dtypes.pt"))
    crossed = torch.load(tmp_path / "dtypes.pt", weights_only=True)
    assert crossed.keys() == {1, 2, 3}
    for dtypes in crossed.values():  # statistics are in float64
        assert "torch.float32" in dtypes
        assert "torch.bfloat16" not in dtypes


def test_a_loss_that_is_not_finite_on_one_rank_fails_the_step_of_all(model_path, tmp_path):
    spawn(2, one_diverges, model_path, str(tmp_path))
    for rank in (0, 1):
        errors = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert errors.keys() == {0, 1, 2, 3}
        assert all("gradient norm is" in text for text in errors.values())


@pytest.mark.slow
def test_ranks_agree_on_a_batch_without_a_token_and_on_one_that_only_one_rank_has_tokens_of(
    model_path, tmp_path_factory
):
    results = by_ranks(without_tokens, model_path, tmp_path_factory)
    reference, _ = results[1, 0]
    for (ranks, stage), (weights, steps) in results.items():
        assert steps == [1, 0, 1, 1], (ranks, stage)
        torch.testing.assert_close(weights, reference, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_muon_takes_the_same_steps_with_one_rank_and_two(model_path, tmp_path):
    found = []
    for ranks in (1, 2):
        spawn(ranks, muon_weights, model_path, str(tmp_path / "weights.pt"))
        found.append(torch.load(tmp_path / "weights.pt", weights_only=True))
    for results in found:
        for weights in results.values():
            # Orthogonalising in few bits spreads the rounding of the sum over ranks.
            torch.testing.assert_close(weights, found[0][0], rtol=0, atol=2e-3)
            assert torch.equal(weights, results[0]), "the ZeRO stage changes nothing"


@pytest.fixture(scope="module", params=[1, 2])
def interrupted(model_path, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("checkpoints")
    file = folder / "results.pt"
    spawn(request.param, resumed, model_path, str(folder), str(file))
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), COMBINATIONS)
def test_training_on_from_a_checkpoint_is_bit_for_bit_training_without_interruption(
    interrupted, stage, dtype
):
    straight, again = interrupted[stage, dtype]
    assert again["statistics"] == straight["statistics"]
    assert again["draws"] == straight["draws"]
    assert again["steps"] == straight["steps"] == 8
    assert again["weights"].keys() == straight["weights"].keys()
    for name, tensor in straight["weights"].items():
        assert torch.equal(again["weights"][name], tensor), name


@pytest.mark.slow
def test_ranks_whose_disk_fills_up_within_a_checkpoint_wait_for_room_and_go_on(
    model_path, mount_disk, tmp_path
):
    small_disk = mount_disk("32m")
    spawn(2, filled, model_path, str(small_disk), str(tmp_path / "results.pt"))
    straight, again = torch.load(tmp_path / "results.pt", weights_only=True)
    assert list(small_disk.glob("waited-*"))
    assert not list(small_disk.glob(".v*"))
    assert again["statistics"] == straight["statistics"]
    for name, tensor in straight["weights"].items():
        assert torch.equal(again["weights"][name], tensor), name


@pytest.fixture(scope="module")
def by_objective(model_path, tmp_path_factory):
    """Gradients and statistics by number of ranks, objective and ZeRO stage."""
    return by_ranks(objectives, model_path, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_kind_of_objective_has_one_gradient(
    by_objective, objective, stage, ranks, record_property
):
    references, expected = by_objective[1, objective, 0]
    gradients, found = by_objective[ranks, objective, stage]
    assert len(gradients) == (2 if objective == "critic" else 1)
    for gradient, reference in zip(gradients, references, strict=True):
        assert reference.norm() > 0
        difference = float((gradient - reference).norm() / reference.norm())
        record_property("relative_difference", difference)
        assert difference < 1e-6
    for name in ("loss", "policy_loss", "reference_kl", "value_loss", "explained_variance"):
        if name in expected:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert found["fractions"] == pytest.approx(expected["fractions"])


@pytest.fixture(scope="module", params=[1, 2])
def interrupted_with_models(model_path, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("models")
    file = folder / "results.pt"
    spawn(request.param, resumed_with_models, model_path, str(folder), str(file))
    return folder, torch.load(file, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_critic_reference_and_coefficients_go_on_bit_for_bit(interrupted_with_models, stage):
    straight, again = interrupted_with_models[1][stage]
    assert again["statistics"] == straight["statistics"]
    for name, tensor in straight["weights"].items():
        assert torch.equal(again["weights"][name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "stage"), [(2, 0), (0, 2), (2, 1)])
def test_they_go_on_in_another_layout_the_same_to_rounding(
    model_path, interrupted_with_models, saved, stage
):
    folder, results = interrupted_with_models
    path = checkpoint.checkpoint_path(folder / str(saved), 2)
    shared = {"model_path": model_path, "seed": 0, "steps": 4, "checkpoint": str(path)}
    rank = Rank(LearnerSpec(config=with_models(zero_stage=stage), **shared))
    straight, again = results[saved][0], go_on(rank, range(2, 4), 0, None)
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
    temporary = checkpoint.prepare(tmp_path, 2)
    rank.capture()
    rank.write(str(temporary))
    rank.close()
    saved = checkpoint.finish(tmp_path, state_of(rank, version=2))

    earlier = EarlierSession(2, after.stepping_as(before), 4)
    rank = Rank(LearnerSpec(config=after, steps=9, earlier=(earlier,), **shared))
    assert same(weights_after(rank, [0, 1]), trained)
    again = weights_after(rank, [2])
    rank.close()
    for config, steps, equal in ((after, 9, True), (before, 4, False)):
        rank = Rank(LearnerSpec(config=config, steps=steps, checkpoint=str(saved), **shared))
        assert same(weights_after(rank, [2]), again) == equal
        rank.close()


def state_of(rank, version):
    return checkpoint.State(
        version=version,
        saved_at=0.0,
        optimizer_steps=rank.engine.steps_taken,
        ranks=1,
        zero_stage=rank.config.zero_stage,
        dtype=rank.config.dtype,
        cursor=None,
    )


def weights_after(rank, versions):
    """Train the batches of versions; return the weights of policy and critic."""
    for version in versions:
        groups = random_groups(seed=version, version=version)
        rank.update([encode(group) for group in groups], version)
    return [tensor.clone() for _, tensor in (*rank.engine.weights(), *rank.critic.weights())]


def same(left, right):
    return all(map(torch.equal, left, right))
