"""Advantage estimators: golden values, invariances, refusals."""

import itertools
import math
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from headway.registry import Entry
from learner import compute_advantages
from learner.advantages import Estimate, advantage
from learner.config.traits import ESTIMATORS, AdvantageTraits

GROUP_OF_FOUR = torch.tensor([1.0, 0.0, 0.0, 0.0])
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def values(name, rewards=GROUP_OF_FOUR, groups=ONE_GROUP, **options):
    return compute_advantages(name, rewards, groups, **options).values


def with_everything(name, rewards, groups, lengths=None, **options):
    """Any estimator, given all it may need: rollouts of a prompt token and two sampled ones.

    Critic and greedy rollout say 0.3; the one part of the reward is the reward.
    """
    rows = torch.arange(len(rewards)).repeat_interleave(3)
    return compute_advantages(
        name,
        rewards,
        groups,
        lengths=torch.full_like(groups, 2) if lengths is None else lengths,
        baseline_rewards=torch.full_like(rewards, 0.3),
        reward_parts={"all": rewards},
        mask=torch.tensor([False, True, True]).repeat(len(rewards)),
        sequence_ids=rows,
        values=torch.full((len(rows),), 0.3, dtype=rewards.dtype),
        **options,
    )


def by_rollout(result, rollouts):
    """[R, 3] advantages of the tokens of `with_everything`."""
    rows = torch.arange(rollouts).repeat_interleave(3)
    return result.on_tokens(rows).reshape(rollouts, 3)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1.5, -0.5, -0.5, -0.5]),
        ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", {}, [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", {"baseline": "leave_one_out"}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce", {"baseline": "ema"}, [1, 0, 0, 0]),
        ("batch_norm", {}, [1.5, -0.5, -0.5, -0.5]),
        ("maxrl", {}, [3, -1, -1, -1]),
        ("opo", {"lengths": torch.tensor([2, 2, 2, 2])}, [0.75, -0.25, -0.25, -0.25]),
        ("opo", {"lengths": torch.tensor([7, 1, 1, 1])}, [0.3, -0.7, -0.7, -0.7]),
        ("remax", {"baseline_rewards": torch.tensor([0.5] * 4)}, [0.5, -0.5, -0.5, -0.5]),
        ("gdpo", {"reward_parts": {"only": GROUP_OF_FOUR}}, [1.5, -0.5, -0.5, -0.5]),
        ("pass_at_k", {"k": 1}, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("best_of_n", {}, [1, 0, 0, 0]),
        ("best_worst", {}, [1, -1, 0, 0]),
    ],
)
def test_one_success_in_four_has_the_hand_computed_advantages(name, options, expected):
    torch.testing.assert_close(
        values(name, **options), torch.tensor(expected).float(), atol=5e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        *itertools.product(sorted({*ESTIMATORS} - {"remax", "gae"}), [0.3, 0.0, 1.0, 1e6]),
        *itertools.product(sorted({*ESTIMATORS} - {"remax", "gae", "maxrl"}), [-7.1]),
    ],
)
def test_equal_rewards_give_exactly_zero(name, reward):
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    result = with_everything(name, torch.full((6,), reward), groups)
    assert by_rollout(result, 6).tolist() == [[0.0] * 3] * 6
    one_group = with_everything(name, torch.full((6,), reward), torch.zeros_like(groups))
    assert by_rollout(one_group, 6).tolist() == [[0.0] * 3] * 6


def test_groups_are_told_apart_whatever_their_order():
    rewards = torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 5.0, 0.0])
    groups = torch.tensor([9, 2, 9, 2, 9, 2, 9])
    expected = torch.tensor([1.5, 0, -0.5, 0, -0.5, 0, -0.5])
    torch.testing.assert_close(values("grpo", rewards, groups), expected, atol=5e-6, rtol=0)


def test_what_is_relative_has_nothing_to_say_where_no_group_varies():
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert values("reinforce", rewards, groups).tolist() == [0.5, 0.5, -0.5, -0.5]
    for name in (name for name in ESTIMATORS if ESTIMATORS[name].traits.relative):
        result = with_everything(name, rewards, groups)
        assert by_rollout(result, 4).tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize("name", list(ESTIMATORS))
@given(data=st.data())
def test_permuting_rollouts_and_groups_permutes_advantages(name, data):
    # Different rewards: of equal ones, best_of_n and best_worst take the first.
    rewards = data.draw(st.lists(st.floats(0, 3, width=32), min_size=6, max_size=6, unique=True))
    order = data.draw(st.permutations(range(6)))
    rewards, groups = torch.tensor(rewards), torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([5, 1, 2, 8, 3, 3])
    plain = with_everything(name, rewards, groups, lengths)
    shuffled = with_everything(name, rewards[order], groups[order], lengths[order])
    torch.testing.assert_close(by_rollout(shuffled, 6), by_rollout(plain, 6)[order])
    assert shuffled.keep.tolist() == plain.keep[order].tolist()


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_rollout_without_a_reward_is_as_if_it_were_not_there(name, bad):
    rewards = torch.tensor([1.0, bad, 0.0, 0.5, 0.0, 1.0, 0.0, bad])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    there = torch.isfinite(rewards)
    found = with_everything(name, rewards, groups)
    expected = with_everything(name, rewards[there], groups[there])
    assert torch.equal(by_rollout(found, 8)[there], by_rollout(expected, 6))
    assert found.keep[there].tolist() == expected.keep.tolist()
    assert not found.keep[~there].any()
    assert not by_rollout(found, 8)[~there].any()
    assert found.unscored == 2


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"maxrl", "remax", "pass_at_k", "gae"}))
@given(rewards=st.lists(st.integers(-4, 4), min_size=6, max_size=6), shift=st.integers(-1000, 1000))
def test_a_constant_on_every_reward_changes_nothing(name, rewards, shift):
    rewards, groups = torch.tensor(rewards).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([5, 1, 2, 8, 3, 3])
    plain = with_everything(name, rewards, groups, lengths)
    shifted = with_everything(name, rewards + shift, groups, lengths)
    torch.testing.assert_close(shifted.values, plain.values)


@given(rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_group_methods_sum_to_zero_and_differ_by_a_factor(rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    centred, leave_one_out = values("dr_grpo", rewards, groups), values("rloo", rewards, groups)
    assert abs(float(centred.double().sum())) < 1e-4
    factor = len(rewards) / (len(rewards) - 1)
    torch.testing.assert_close(leave_one_out, centred * factor)
    normal = values("grpo", rewards, groups)
    assert torch.isfinite(normal).all()
    assert normal.abs().max() <= len(rewards) ** 0.5


def test_a_group_of_one_gets_zero_but_cannot_leave_one_out():
    alone = torch.tensor([3.0]), torch.tensor([0])
    assert values("grpo", *alone).tolist() == [0.0]
    assert values("dr_grpo", *alone).tolist() == [0.0]
    with pytest.raises(InputError, match="at least 2 rollouts"):
        values("rloo", *alone)


def test_the_running_baseline_uses_earlier_batches_only_and_is_bias_corrected():
    options = {"baseline": "ema", "decay": 0.9, "state": {}}
    for rewards, expected in (
        ([1.0, 0.0], [1.0, 0.0]),
        ([1.0, 1.0], [0.5, 0.5]),
        ([0.0], [-(0.9 * 0.5 + 1.0) / 1.9]),
    ):
        found = values("reinforce", torch.tensor(rewards), ONE_GROUP[: len(rewards)], **options)
        assert found.tolist() == pytest.approx(expected)


def test_a_batch_without_any_score_is_all_zero():
    result = compute_advantages("grpo", torch.tensor([float("nan")] * 2), torch.tensor([0, 0]))
    assert result.values.tolist() == [0, 0]
    assert not result.keep.any()


def test_values_are_float32_and_carry_no_gradient():
    rewards = GROUP_OF_FOUR.double().requires_grad_()
    assert values("grpo", rewards).dtype == torch.float32
    assert not values("grpo", rewards).requires_grad


def test_batch_norm_divides_by_the_deviation_of_the_groups_that_vary():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 5, 5, 5, 5])
    groups = torch.arange(3).repeat_interleave(4)
    # Σ of the squares 0.75 + 1 over 8 − 1 rollouts: σ = 1/2
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 1, 1, -1, -1, 0, 0, 0, 0])
    found = values("batch_norm", rewards, groups)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    filtered = values("batch_norm", rewards[:8], groups[:8])
    assert torch.equal(filtered, found[:8])


def test_gdpo_normalises_each_part_and_then_the_sum():
    parts = {
        "right": torch.tensor([1.0, 0, 0, 0, 1, 1]),
        "short": torch.tensor([10.0, 30, 10, 30, 7, 7]),
    }
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    right = torch.tensor([1.5, -0.5, -0.5, -0.5])
    short = torch.tensor([-1.0, 1, -1, 1]) * 0.75**0.5
    total = 2 * right + short
    expected = torch.cat([(total - total.mean()) / total.std(), torch.zeros(2)])
    found = values(
        "gdpo", torch.zeros(6), groups, reward_parts=parts, weights={"right": 2.0, "short": 1.0}
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert found[4:].tolist() == [0, 0]


def test_a_part_without_variance_leaves_the_others_their_say():
    parts = {"right": torch.tensor([1.0, 0, 0, 0]), "format": torch.full((4,), 0.3)}
    found = values("gdpo", reward_parts=parts)
    torch.testing.assert_close(found, values("grpo"), atol=1e-5, rtol=0)


def test_a_missing_part_adds_nothing_and_a_rollout_without_any_does_not_train():
    nan = math.nan
    parts = {
        "right": torch.tensor([1.0, 0, 0, 0, nan, nan]),
        "short": torch.tensor([nan, 1, nan, 3, 2, nan]),
    }
    result = compute_advantages(
        "gdpo", torch.zeros(6), torch.zeros(6, dtype=torch.int64), reward_parts=parts
    )
    assert result.keep.tolist() == [True] * 5 + [False]
    right = torch.tensor([1.5, -0.5, -0.5, -0.5, 0])
    total = right + torch.tensor([0.0, -1, 0, 1, 0])
    expected = torch.cat([(total - total.mean()) / total.std(), torch.zeros(1)])
    torch.testing.assert_close(result.values, expected, atol=1e-5, rtol=0)
    zeros = torch.zeros(6), torch.zeros(6).long()
    chosen = compute_advantages("gdpo", *zeros, reward_parts=parts, weights={"right": 1.0})
    assert chosen.keep.tolist() == [True] * 4 + [False] * 2
    torch.testing.assert_close(chosen.values[:4], right[:4], atol=1e-5, rtol=0)


def test_pass_at_k_has_the_published_values():
    rewards = torch.tensor([0.0, 1, 0, 1, 0, 0])
    found = values("pass_at_k", rewards, torch.zeros(6, dtype=torch.int64), k=3)
    torch.testing.assert_close(
        found, torch.tensor([-0.25, 0.5, -0.25, 0.5, -0.25, -0.25]), atol=1e-5, rtol=0
    )


@given(correct=st.lists(st.booleans(), min_size=1, max_size=7), k=st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_sets_that_hold_the_rollout(correct, k):
    n, k = len(correct), min(k, len(correct))
    found = values("pass_at_k", torch.tensor(correct).float(), torch.zeros(n).long(), k=k)
    sets = [
        (chosen, any(correct[i] for i in chosen)) for chosen in itertools.combinations(range(n), k)
    ]
    rho = sum(success for _, success in sets) / len(sets)
    sigma = (rho * (1 - rho)) ** 0.5
    for i in range(n):
        mine = [success for chosen, success in sets if i in chosen]
        expected = (sum(mine) / len(mine) - rho) / sigma if sigma else 0.0
        assert found[i].item() == pytest.approx(expected, abs=1e-4)
    assert found.double().sum().item() == pytest.approx(0, abs=1e-5)


def test_a_group_smaller_than_k_makes_one_set():
    rewards, groups = torch.tensor([1.0, 0, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 1])
    assert values("pass_at_k", rewards, groups, k=3).tolist() == [0] * 5


def test_what_counts_as_correct_is_the_threshold():
    rewards = torch.tensor([-1.0, -1.0, -0.5, -1.0])
    assert values("pass_at_k", rewards, k=1).tolist() == [0] * 4
    assert values("pass_at_k", rewards, k=1, threshold=-0.5).argmax() == 2


@pytest.mark.parametrize("baseline", [math.nan, math.inf])
def test_a_rollout_without_a_greedy_one_does_not_train(baseline):
    baselines = torch.tensor([0.5, baseline, 0.5, 0.5])
    result = compute_advantages("remax", GROUP_OF_FOUR, ONE_GROUP, baseline_rewards=baselines)
    assert result.values.tolist() == [0.5, 0, -0.5, -0.5]
    assert result.keep.tolist() == [True, False, True, True]
    assert result.unscored == 1


def test_maxrl_of_a_group_that_failed_is_zero_and_a_negative_reward_is_refused():
    rewards, groups = torch.tensor([0.0, 0, 1, 0]), torch.tensor([0, 0, 1, 1])
    assert values("maxrl", rewards, groups).tolist() == [0, 0, 1, -1]
    with pytest.raises(InputError, match=r"'maxrl' needs rewards >= 0, found -0.5"):
        values("maxrl", rewards - 0.5, groups)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 0, 0, 0, 0, 0]),
        ({"top": 2}, [1, 1, 0, 0, 0, 0, 0]),
        ({"top": 9}, [1, 1, 1, 1, 0, 0, 0]),
        ({"top": 2, "min_reward": 2.0}, [0, 1, 0, 0, 1, 1, 0]),
        ({"min_reward": 1.0}, [0, 1, 0, 0, 1, 0, 0]),
        ({"min_reward": 9.0}, [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_best_of_a_group_are_kept_the_first_of_equals_and_none_of_a_tie(options, expected):
    rewards = torch.tensor([1.0, 2.0, 1.0, 0.0, 3.0, 3.0, 0.5])
    result = compute_advantages(
        "best_of_n", rewards, torch.tensor([4, 4, 4, 4, 1, 1, 2]), **options
    )
    assert result.values.tolist() == expected
    assert result.keep.tolist() == [value == 1 for value in expected]


def test_pairs_are_the_best_and_the_worst_of_a_group_that_varies():
    rewards = torch.tensor([1.0, 3.0, 0.0, 3.0, 0.0, 7.0, 7.0, 1.0])
    result = compute_advantages("best_worst", rewards, torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]))
    assert result.values.tolist() == [0, 1, -1, 0, 0, 0, 0, 0]
    assert result.keep.tolist() == [False, True, True] + [False] * 5


def test_a_weight_of_a_part_that_the_batch_lacks_adds_nothing():
    parts = {"right": GROUP_OF_FOUR, "short": GROUP_OF_FOUR}
    both = values("gdpo", reward_parts=parts, weights={"right": 1.0, "rare": 1.0})
    assert torch.equal(both, values("gdpo", reward_parts=parts, weights={"right": 1.0}))
    options = {"reward_parts": parts, "weights": {"rare": 1.0}}
    alone = compute_advantages("gdpo", GROUP_OF_FOUR, ONE_GROUP, **options)
    assert (alone.values.tolist(), alone.keep.tolist()) == ([0.0] * 4, [False] * 4)


@pytest.fixture
def of_the_users(monkeypatch):
    def register(function):
        module = ModuleType("advantages_of_a_user")
        module.own = Entry("own", function, AdvantageTraits())
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return "advantages_of_a_user:own"

    return register


def test_an_estimator_of_the_users_may_select_and_return_what_a_critic_learns(of_the_users):
    def first(batch):
        keep = torch.arange(len(batch.rewards)) == 0
        ones = torch.ones(len(batch.tokens.mask))
        return Estimate(ones, token_level=True, keep=keep, returns=2 * ones)

    rewards = torch.tensor([math.nan, 1.0, 0.0])
    result = with_everything(of_the_users(first), rewards, torch.zeros(3).long())
    assert result.keep.tolist() == [False, True, False]
    assert result.values.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert result.returns.tolist() == [0, 0, 0, 2, 2, 2, 0, 0, 0]


def test_an_estimator_of_the_users_that_returns_another_number_of_values_is_refused(of_the_users):
    path = of_the_users(lambda batch: batch.rewards[:2])
    with pytest.raises(InputError, match=r"must return 4 numbers, one for each rollout .* \(2,\)"):
        values(path)


def test_a_need_that_nothing_can_meet_is_refused():
    with pytest.raises(InputError, match="'own' cannot need entropy: only baseline_rewards, len"):
        advantage("own", needs={"entropy"})


FOUR, FIVE = torch.ones(4).bool(), torch.arange(5)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("grop", {}, r"'grop'.*did you mean 'grpo'"),
        ("grpo", {"epsilno": 1.0}, "no option epsilno; its options: epsilon"),
        ("reinforce", {"baseline": "median"}, "baseline = 'median' of .*: Input should be 'mean'"),
        ("pass_at_k", {"k": 0}, "advantage_options.k = 0 of 'pass_at_k': .* or equal to 1"),
        *(
            ("best_of_n", {"top": top}, f"top = {top} of 'best_of_n': Input should be a")
            for top in (1.5, True)
        ),
        ("best_of_n", {"top": 0}, "top = 0 of 'best_of_n': Input should be greater than or equal"),
        *(
            (name, {}, f"advantage '{name}' needs {need}")
            for name, need in (
                ("opo", "lengths"), ("remax", "baseline_rewards"), ("gdpo", "reward_parts"),
                ("gae", "values"),
            )
        ),
        ("grpo", {"groups": ONE_GROUP[:3]}, r"groups must be \[R\] like rewards \(4,\), .*\(3,\)"),
        ("grpo", {"lengths": torch.ones(3)}, r"lengths must be \[R\] like rewards \(4,\)"),
        ("grpo", {"truncated": torch.ones(4, 1)}, r"truncated must be \[R\]"),
        ("grpo", {"reward_parts": {"a": FIVE}}, r"reward_parts\['a'\] must be \[R\]"),
        ("grpo", {"mask": FOUR, "sequence_ids": FIVE}, r"sequence_ids must be \[N\] like mask"),
        ("grpo", {"mask": FIVE > 9, "sequence_ids": FIVE}, r"must be indices 0..3 .* found 0..4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name, arguments, message):
    with pytest.raises(InputError, match=message):
        values(name, **arguments)
