"""Advantage estimators: golden values, invariances, refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import ESTIMATORS, compute_advantages
from learner.config import ADVANTAGES
from learner.errors import InputError

GROUP_OF_FOUR = torch.tensor([1.0, 0.0, 0.0, 0.0])
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def values(name, rewards=GROUP_OF_FOUR, groups=ONE_GROUP, **options):
    return compute_advantages(name, rewards, groups, **options).values


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1.5, -0.5, -0.5, -0.5]),
        ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", {}, [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", {"baseline": "leave_one_out"}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce", {"baseline": "ema"}, [1, 0, 0, 0]),
    ],
)
def test_one_success_in_four_has_the_hand_computed_advantages(name, options, expected):
    torch.testing.assert_close(
        values(name, **options), torch.tensor(expected).float(), atol=5e-6, rtol=0
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.3, -7.1, 0.0, 1e6])
def test_equal_rewards_give_exactly_zero(name, reward):
    result = values(name, torch.full((6,), reward), torch.zeros(6, dtype=torch.int64))
    assert result.tolist() == [0.0] * 6


def test_groups_are_told_apart_whatever_their_order():
    rewards = torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 5.0, 0.0])
    groups = torch.tensor([9, 2, 9, 2, 9, 2, 9])
    expected = torch.tensor([1.5, 0, -0.5, 0, -0.5, 0, -0.5])
    torch.testing.assert_close(values("grpo", rewards, groups), expected, atol=5e-6, rtol=0)


def test_only_reinforce_looks_across_groups():
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert values("reinforce", rewards, groups).tolist() == [0.5, 0.5, -0.5, -0.5]
    for name in ("grpo", "rloo", "dr_grpo"):
        assert values(name, rewards, groups).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ADVANTAGES)
@given(data=st.data())
def test_permuting_rollouts_permutes_advantages(name, data):
    rewards = data.draw(st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6))
    order = data.draw(st.permutations(range(6)))
    rewards, groups = torch.tensor(rewards), torch.tensor([0, 0, 0, 1, 1, 1])
    shuffled = values(name, rewards[list(order)], groups[list(order)])
    torch.testing.assert_close(shuffled, values(name, rewards, groups)[list(order)])


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
    state = {}
    first = values(
        "reinforce", torch.tensor([1.0, 0.0]), ONE_GROUP[:2], baseline="ema", decay=0.9, state=state
    )
    assert first.tolist() == [1.0, 0.0]
    second = values(
        "reinforce", torch.tensor([1.0, 1.0]), ONE_GROUP[:2], baseline="ema", decay=0.9, state=state
    )
    torch.testing.assert_close(second, torch.tensor([0.5, 0.5]))
    third = values(
        "reinforce", torch.tensor([0.0]), ONE_GROUP[:1], baseline="ema", decay=0.9, state=state
    )
    assert third.item() == pytest.approx(-(0.9 * 0.5 + 1.0) / 1.9)


def test_a_reward_that_is_not_finite_neither_trains_nor_enters_the_baseline():
    rewards = torch.tensor([1.0, float("nan"), 0.0, 0.0, 0.0, float("inf")])
    result = compute_advantages("grpo", rewards, torch.zeros(6, dtype=torch.int64))
    assert result.keep.tolist() == [True, False, True, True, True, False]
    torch.testing.assert_close(
        result.values, torch.tensor([1.5, 0, -0.5, -0.5, -0.5, 0]), atol=5e-6, rtol=0
    )
    assert result.stats == {"groups": 1, "tied_groups": 0, "unscored": 2}


def test_statistics_count_groups_without_signal():
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert compute_advantages("grpo", rewards, groups).stats["tied_groups"] == 1


def test_a_batch_without_any_score_is_all_zero():
    result = compute_advantages("grpo", torch.tensor([float("nan")] * 2), torch.tensor([0, 0]))
    assert result.values.tolist() == [0, 0]
    assert not result.keep.any()


def test_values_are_float32_and_carry_no_gradient():
    rewards = GROUP_OF_FOUR.double().requires_grad_()
    assert values("grpo", rewards).dtype == torch.float32
    assert not values("grpo", rewards).requires_grad


def test_the_registry_holds_what_the_configuration_allows():
    assert set(ESTIMATORS) == set(ADVANTAGES)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"'grop'.*did you mean 'grpo'"):
        values("grop")


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="no option epsilno; its options: epsilon"):
        values("grpo", epsilno=1.0)


def test_an_unknown_baseline_is_refused():
    with pytest.raises(InputError, match="'median' is not one of 'mean'"):
        values("reinforce", baseline="median")


def test_shapes_must_agree():
    with pytest.raises(InputError, match=r"found \(4,\) and \(3,\)"):
        values("grpo", groups=ONE_GROUP[:3])
