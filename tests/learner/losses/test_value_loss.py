"""The critic's side: GAE against the sum it stands for, the clipped loss, explained variance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from learner.advantages.returns import gae, length_adaptive_lambda, returns_to_go
from learner.losses.value_loss import CriticSums, value_loss

ALL = torch.ones(3, dtype=torch.bool)
ONE = torch.zeros(3, dtype=torch.int64)


def by_definition(rewards, values, mask, ids, gamma, lam, bootstrap):
    """A_t = Σ_{s ≥ t} (γλ)^(s − t)·δ_s over the sampled tokens of each sequence."""
    advantages = torch.zeros_like(values)
    for sequence, own_lam, own_bootstrap in zip(ids.unique(), lam, bootstrap, strict=True):
        at = (mask & (ids == sequence)).nonzero().flatten().tolist()
        following = [values[i] for i in at[1:]] + [own_bootstrap] * bool(at)
        deltas = [rewards[i] + gamma * v - values[i] for i, v in zip(at, following, strict=True)]
        for t, index in enumerate(at):
            discounts = (gamma * own_lam) ** torch.arange(len(at) - t)
            advantages[index] = (discounts * torch.stack(deltas[t:])).sum()
    return advantages


@given(data=st.data(), gamma=st.sampled_from([0.0, 0.9, 1.0]), size=st.integers(1, 20))
def test_gae_is_the_discounted_sum_of_the_surprises_whatever_the_order(data, gamma, size):
    draw = st.lists(st.floats(-2, 2), min_size=size, max_size=size)
    rewards, values = (torch.tensor(data.draw(draw), dtype=torch.float64) for _ in range(2))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    ids = torch.tensor(
        data.draw(st.lists(st.sampled_from([3, -1, 9]), min_size=size, max_size=size))
    )
    count = len(ids.unique())
    lam = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)[:count]
    bootstrap = torch.tensor([0.3, 0.0, -2.0], dtype=torch.float64)[:count]
    advantages, returns = gae(rewards, values, mask, ids, gamma=gamma, lam=lam, bootstrap=bootstrap)
    expected = by_definition(rewards, values, mask, ids, gamma, lam, bootstrap)
    torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(returns, expected + values, atol=1e-12, rtol=0)


def test_one_number_serves_all_sequences():
    rewards, values = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 0.25, 1.0])
    ids, each = torch.tensor([0, 1, 1]), torch.tensor([0.5, 0.5])
    one = gae(rewards, values, ALL, ids, gamma=0.5, lam=0.5, bootstrap=0.5)
    many = gae(rewards, values, ALL, ids, gamma=0.5, lam=each, bootstrap=each)
    assert torch.equal(one[0], many[0])
    assert one[0].tolist() == [1 + 0.25 - 0.5, 0.5 - 0.25 + 0.25 * 1.25, 2 + 0.25 - 1]


def test_without_a_critic_and_discount_it_is_what_is_still_to_come():
    rewards, mask = torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([True, True, False, True, True])
    ids = torch.tensor([0, 0, 0, 0, 1])
    advantages, returns = gae(rewards, torch.zeros(5), mask, ids, gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [11, 10, 0, 8, 16]
    assert returns_to_go(rewards, mask, ids).tolist() == [11, 10, 0, 8, 16]
    assert returns_to_go(rewards, mask, ids, gamma=0.5).tolist() == [4, 6, 0, 8, 16]


def test_what_is_masked_out_is_stepped_over_whatever_it_holds():
    nan = math.nan
    rewards, values = torch.tensor([1.0, nan, 2.0]), torch.tensor([0.5, nan, 0.25])
    mask = torch.tensor([True, False, True])
    advantages, returns = gae(rewards, values, mask, ONE, gamma=0.5, lam=0.5)
    both = torch.tensor([0, 2])
    inner, inner_returns = gae(
        rewards[both], values[both], mask[both], ONE[both], gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [inner[0].item(), 0.0, inner[1].item()]
    assert returns.tolist() == [inner_returns[0].item(), 0.0, inner_returns[1].item()]


def test_precision_follows_the_values_and_no_gradient_flows():
    for dtype, expected in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ]:
        values = torch.zeros(3, dtype=dtype, requires_grad=True)
        advantages, returns = gae(torch.ones(3), values, ALL, ONE, gamma=1.0, lam=1.0)
        assert advantages.dtype == returns.dtype == expected
        assert not advantages.requires_grad
        assert not returns.requires_grad


def test_nothing_in_gives_nothing_out():
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    advantages, _ = gae(empty, empty, none, torch.zeros(0).long(), gamma=1.0, lam=1.0)
    assert advantages.shape == (0,)
    advantages, _ = gae(torch.ones(3), torch.ones(3), ~ALL, ONE, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5, "lam": 1.0}, r"gamma must be in \[0, 1\], found 1.5"),
        ({"gamma": 1.0, "lam": torch.tensor([-0.5])}, r"lam must be in \[0, 1\], found -0.5..-0.5"),
        ({"gamma": 1.0, "lam": float("nan")}, r"lam must be in \[0, 1\], found nan..nan"),
        ({"gamma": 1.0, "lam": torch.ones(3)}, r"lam must be a number or one for each of 1 seq"),
        ({"gamma": 1.0, "lam": 1.0, "bootstrap": torch.ones(2)}, r"bootstrap must be .* \(2,\)"),
    ],
)
def test_gae_refuses_what_has_no_meaning(options, message):
    with pytest.raises(InputError, match=message):
        gae(torch.ones(3), torch.ones(3), ALL, ONE, **options)


def test_shapes_must_agree():
    with pytest.raises(InputError, match=r"mask must be \[N\] like values \(2,\), found \(3,\)"):
        gae(torch.ones(2), torch.ones(2), ALL, ONE[:2], gamma=1.0, lam=1.0)
    with pytest.raises(InputError, match=r"returns must be \[N\] like values"):
        value_loss(torch.ones(2), torch.ones(2), torch.ones(3))


def test_a_long_rollout_has_a_lambda_near_one():
    lengths = torch.tensor([1000, 40, 20, 10, 0])
    assert length_adaptive_lambda(lengths, 0.05).tolist() == [0.98, 0.5, 0.0, 0.0, 0.0]
    with pytest.raises(InputError, match="must be positive, found 0"):
        length_adaptive_lambda(lengths, 0)


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (2.0, None, 0.5, 1.0),
        (2.0, 0.5, 0.5, 1.0),  # near 1.5 is closer to the return than 2.0 is: the farther counts
        (0.2, 0.5, 0.32, -0.8),
        (1.8, 0.5, 0.32, 0.8),
        (0.8, 0.1, 0.5 * 0.81, 0.0),  # moved toward the return by more than the clip: no gradient
    ],
)
def test_the_value_loss_is_the_larger_of_the_two_squares(value, clip, loss, slope):
    old = torch.tensor([0.0 if value == 0.8 else 1.0], dtype=torch.float64)
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found = value_loss(values, old, torch.ones(1, dtype=torch.float64), clip=clip)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)


def test_a_clip_that_is_not_positive_is_refused():
    with pytest.raises(InputError, match="clip of the value loss must be positive or None"):
        value_loss(torch.ones(1), torch.ones(1), torch.ones(1), clip=0.0)


def critic_sums(values, returns, mask=ALL):
    return CriticSums.of(torch.zeros(()), values, returns, mask)


def test_explained_variance_adds_up_over_parts():
    make = torch.Generator().manual_seed(1)
    returns = torch.randn(50, generator=make) + 100
    values = returns + 0.5 * torch.randn(50, generator=make)
    mask = torch.rand(50, generator=make) < 0.7
    first, second = (
        critic_sums(values[s], returns[s], mask[s]) for s in (slice(20), slice(20, 50))
    )
    kept, target = values[mask].double(), returns[mask].double()
    expected = 1 - (target - kept).var() / target.var()
    assert (first + second).explained_variance == pytest.approx(expected.item(), abs=1e-9)


def test_explained_variance_of_the_textbook_critics():
    returns = torch.tensor([1.0, 2.0, 6.0])
    for values, expected in [(returns, 1.0), (torch.full((3,), 3.0), 0.0), (-returns, -3.0)]:
        assert critic_sums(values, returns).explained_variance == pytest.approx(expected)


def test_explained_variance_of_nothing_and_of_equal_returns_is_none():
    equal, nan = torch.full((3,), 0.3), torch.full((3,), math.nan)
    assert critic_sums(equal, equal).explained_variance is None
    assert critic_sums(nan, nan, ~ALL).explained_variance is None
