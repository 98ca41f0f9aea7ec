"""What estimators claim in expectation, by enumerating every group a small softmax can draw."""

from itertools import product

import pytest
import torch

from learner import compute_advantages
from learner.config.learner import LearnerConfig
from learner.config.objective_rules import what_ties_teach
from learner.config.traits import ESTIMATORS

LOGITS = torch.tensor([0.3, -0.7, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64)
BINARY = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
LENGTHS = torch.tensor([1, 5, 2])


def expected_gradient(name, size, outcome_rewards=REWARDS, **options):
    """E[(1/G) Σ A_i ∇ log p(y_i)] over all groups of `size` outcomes, [3]."""
    probabilities = LOGITS.softmax(0)
    scores = torch.eye(3, dtype=torch.float64) - probabilities  # row y: ∇ log p(y)
    total = torch.zeros(3, dtype=torch.float64)
    for outcomes in product(range(3), repeat=size):
        drawn = torch.tensor(outcomes)
        drawn_advantages = compute_advantages(
            name,
            outcome_rewards[drawn],
            torch.zeros(size, dtype=torch.int64),
            lengths=LENGTHS[drawn],
            baseline_rewards=outcome_rewards[LOGITS.argmax()].expand(size),
            **options,
        ).values.double()
        gradient = (drawn_advantages[:, None] * scores[drawn]).mean(0)
        total += probabilities[drawn].prod() * gradient
    return total


def gradient_of(objective):
    logits = LOGITS.clone().requires_grad_()
    objective(logits.softmax(0)).backward()
    return logits.grad


REWARD_GRADIENT = gradient_of(lambda probabilities: (probabilities * REWARDS).sum())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rloo", {}),
        ("remax", {}),
        ("reinforce", {"baseline": "leave_one_out"}),
        # A running mean of earlier batches that stays as it is.
        ("reinforce", {"baseline": "ema", "decay": 1, "state": {"ema": 0.9, "ema_weight": 1.0}}),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_gradient_is_that_of_the_expected_reward(name, options, size):
    found = expected_gradient(name, size, **options)
    torch.testing.assert_close(found, REWARD_GRADIENT, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"), [("dr_grpo", {}), ("reinforce", {"baseline": "mean"})]
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_baseline_that_includes_the_rollout_shortens_the_gradient(name, options, size):
    found = expected_gradient(name, size, **options)
    shorter = (size - 1) / size * REWARD_GRADIENT
    torch.testing.assert_close(found, shorter, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["grpo", "opo"])
def test_what_claims_no_unbiasedness_has_none(name):
    found = expected_gradient(name, 3)
    direction = torch.nn.functional.cosine_similarity(found, REWARD_GRADIENT, dim=0)
    assert 0.9 < direction < 1 - 1e-6


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_maxrl_climbs_the_likelihood_to_the_order_below_the_group_size(size):
    def objective(probabilities):
        p = (probabilities * BINARY).sum()
        return sum((1 - (1 - p) ** k) / k for k in range(1, size)) + 0 * p

    found = expected_gradient("maxrl", size, BINARY)
    torch.testing.assert_close(found, gradient_of(objective), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("size", "k"), [(3, 2), (4, 2), (4, 3)])
def test_pass_at_k_climbs_pass_at_k(size, k):
    def objective(probabilities):
        return 1 - (1 - (probabilities * BINARY).sum()) ** k

    found = expected_gradient("pass_at_k", size, BINARY, k=k)
    assert (found * gradient_of(objective)).sum() > 0


def test_pass_at_k_of_the_whole_group_teaches_nothing():
    assert not expected_gradient("pass_at_k", 3, BINARY, k=3).any()


# Two prompts of unlike difficulty, two rollouts each; the second prompt's rewards often tie.
PROMPTS = torch.tensor([[0.3, -0.7, 0.1], [1.5, 0.2, -0.4]], dtype=torch.float64)
EARNED = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 1, 1])


def summed_gradient(name, *, drop_tied, **options):
    """E[Σ A_i ∇ log p(y_i)] over two groups of two, without tied groups or with them, [2, 3]."""
    probabilities = PROMPTS.softmax(1)
    total = torch.zeros_like(PROMPTS)
    for outcomes in product(range(3), repeat=4):
        drawn = torch.tensor(outcomes)
        rewards = EARNED[GROUPS, drawn]
        advantages = compute_advantages(
            name,
            rewards,
            GROUPS,
            lengths=LENGTHS[drawn],
            baseline_rewards=EARNED[GROUPS, 0],
            reward_parts={"even": (drawn % 2).double(), "all": rewards},
            mask=torch.ones(4, dtype=torch.bool),
            sequence_ids=torch.arange(4),
            values=torch.full((4,), 0.5),
            **options,
        ).values.double()
        tied = (rewards.view(2, 2).diff().flatten() == 0)[GROUPS]
        if drop_tied:
            advantages = advantages * ~tied
        weight = probabilities[GROUPS, drawn].prod()
        scores = torch.eye(3, dtype=torch.float64)[drawn] - probabilities[GROUPS]
        total.index_add_(0, GROUPS, weight * advantages[:, None] * scores)
    return total


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in sorted(ESTIMATORS)), ("best_of_n", {"min_reward": 0.5})],
)
def test_what_may_be_dropped_for_being_tied_has_no_part_in_the_expected_gradient(name, options):
    settings = {"advantage": name, "advantage_options": options}
    if name == "gae":
        settings["critic"] = {}
    config = LearnerConfig(**settings)
    given = {"k": 1} if name == "pass_at_k" else {}
    whole, dropped = (summed_gradient(name, drop_tied=d, **options, **given) for d in (False, True))
    assert whole.abs().max() > 0.01
    if what_ties_teach(config, config.traits) is None:
        torch.testing.assert_close(dropped, whole, atol=1e-12, rtol=0)
    else:
        assert (dropped - whole).abs().max() > 0.01, "a biased estimate"


@pytest.mark.parametrize(
    ("name", "options"), [("reinforce", {"baseline": "leave_one_out"}), ("remax", {}), ("rloo", {})]
)
def test_only_rollouts_compared_with_their_group_stay_unbiased_without_tied_groups(name, options):
    probabilities = PROMPTS.softmax(1)
    mean = (probabilities * EARNED).sum(1, keepdim=True)
    gradient = 2 * probabilities * (EARNED - mean)
    whole = summed_gradient(name, drop_tied=False, **options)
    torch.testing.assert_close(whole, gradient, atol=1e-6, rtol=0)
    error = (summed_gradient(name, drop_tied=True, **options) - gradient).abs().max()
    assert error < 1e-6 if name == "rloo" else error > 0.05
