"""Advantages per token: where the final reward goes, what is still to come, the critic."""

import math

import pytest
import torch

from headway.errors import InputError
from learner import compute_advantages
from learner.advantages.returns import gae
from learner.config.traits import ESTIMATORS
from learner.errors import TrainingDiverged

# Two rollouts of one prompt, packed. The first has two turns and ends on a tool's message.
MASK = torch.tensor([False, True, False, True, False, False, True])
ROWS = torch.tensor([0, 0, 0, 0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0])
GROUP = torch.tensor([0, 0])
TOKENS = {"mask": MASK, "sequence_ids": ROWS}


def values(name, rewards=REWARDS, groups=GROUP, **options):
    return compute_advantages(name, rewards, groups, **{**TOKENS, **options}).values


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected).float(), atol=2e-6, rtol=0)


def test_whitening_is_over_sampled_tokens_so_that_the_longer_rollout_weighs_more():
    # Q = (1, 1, 0): mean 2/3, Bessel's variance 1/3
    scale = 3**0.5
    expected = [0, scale / 3, 0, scale / 3, 0, 0, -2 * scale / 3]
    close(values("reinforce_pp"), expected)


def test_what_is_to_come_is_discounted_by_sampled_token():
    # Q = (1/2 + 3, 1, 0) with the reward of 3 at the first sampled token
    rewards = torch.tensor([9.0, 3, 9, 0, 9, 9, 0])
    to_go = torch.tensor([3.5, 1.0, 0.0])
    white = ((to_go - to_go.mean()) / to_go.std()).tolist()
    found = values("reinforce_pp", token_rewards=rewards, gamma=0.5)
    close(found, [0, white[0], 0, white[1], 0, 0, white[2]])


def test_the_baseline_of_the_group_comes_before_the_whitening():
    # R − μ = (1/2, −1/2), whitened over two and one tokens
    centred = torch.tensor([0.5, 0.5, -0.5])
    white = ((centred - centred.mean()) / centred.std()).tolist()
    close(values("reinforce_pp_baseline"), [0, white[0], 0, white[1], 0, 0, white[2]])


def test_a_group_without_variance_is_zero_and_out_of_the_whitening():
    rewards, groups = torch.tensor([1.0, 0.0, 0.3, 0.3]), torch.tensor([0, 0, 1, 1])
    rows = torch.cat([ROWS, ROWS + 2])
    both = values("reinforce_pp_baseline", rewards, groups, mask=MASK.repeat(2), sequence_ids=rows)
    assert torch.equal(both[:7], values("reinforce_pp_baseline"))
    assert both[7:].tolist() == [0.0] * 7


def test_a_group_without_variance_still_learns_from_token_rewards():
    penalty = torch.tensor([0, -1.0, 0, 0, 0, 0, 0])
    found = values("reinforce_pp_baseline", torch.tensor([0.3, 0.3]), token_rewards=penalty)
    white = torch.tensor([-2.0, 1.0, 1.0]) / 3**0.5
    close(found, [0, white[0], 0, white[1], 0, 0, white[2]])


def test_remax_subtracts_the_greedy_reward_from_what_is_to_come():
    greedy, penalty = torch.tensor([0.25, 0.25]), torch.tensor([9, -0.5, 9, -0.125, 9, 9, -1.0])
    found = values("remax", baseline_rewards=greedy, token_rewards=penalty)
    assert found.tolist() == [0, 0.125, 0, 0.625, 0, 0, -1.25]
    assert values("remax", baseline_rewards=greedy).tolist() == [0, 0.75, 0, 0.75, 0, 0, -0.25]


OF_TOKENS = {"gae", "gdpo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "remax"}


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - OF_TOKENS))
def test_for_whole_rollouts_token_rewards_are_part_of_the_reward(name):
    extra = torch.tensor([9.0, 0.5, 9, 0.25, 9, 9, 2])
    lengths = torch.tensor([2, 1])
    found = values(name, token_rewards=extra, lengths=lengths)
    summed = values(name, REWARDS + torch.tensor([0.75, 2.0]), lengths=lengths)
    assert torch.equal(found, summed)


def test_token_rewards_that_would_be_lost_are_refused():
    parts = {"reward_parts": {"all": REWARDS}}
    assert values("gdpo", token_rewards=torch.zeros(7), **parts).any()
    with pytest.raises(InputError, match="'gdpo' normalises the parts of the reward, and token"):
        values("gdpo", token_rewards=torch.ones(7), **parts)


def test_process_rewards_are_normalised_over_all_steps_of_the_group():
    # Steps of rollout 0: 2 at its first sampled token, 1 + 3 at its last; of rollout 1: 0 + 0.
    rewards = torch.tensor([9.0, 2, 9, 3, 9, 9, 0])
    steps = torch.tensor([2.0, 4.0, 0.0])
    normal = (steps - steps.mean()) / steps.std()
    found = values("grpo", token_rewards=rewards, process_rewards=True)
    first, last, other = normal.tolist()
    close(found, [0, first + last, 0, last, 0, 0, other])


# Four rollouts of one prompt with two, three, one and two turns of two sampled tokens each, and
# what each turn earned; a message of the environment is between turns.
TURNS = [[1.0, 1.0], [1.0, 1.0, 0.0], [1.0], [0.0, 1.0]]


def packed_turns(turns):
    """Return mask, sequence_ids, token rewards and step ends of rollouts with these turns."""
    mask, rows, paid, ends = [], [], [], []
    for row, rewards in enumerate(turns):
        for reward in rewards:
            mask += [False, True, True]
            rows += [row] * 3
            paid += [0.0, 0.0, reward]
            ends += [False, False, True]
    as_tensors = torch.tensor(mask), torch.tensor(rows), torch.tensor(paid), torch.tensor(ends)
    return dict(
        zip(("mask", "sequence_ids", "token_rewards", "step_ends"), as_tensors, strict=True)
    )


def process_advantages_by_hand(turns):
    """Normalise every turn's reward over all turns of the group, and sum what is to come."""
    every = [reward for rewards in turns for reward in rewards]
    mean = sum(every) / len(every)
    deviation = (sum((reward - mean) ** 2 for reward in every) / (len(every) - 1)) ** 0.5
    expected = []
    for rewards in turns:
        normal = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
        for turn in range(len(rewards)):
            expected += [0.0, *[sum(normal[turn:])] * 2]
    return expected


@pytest.mark.parametrize("told", [True, False], ids=["ends given", "ends of turns"])
@pytest.mark.parametrize(
    "turns", [TURNS, [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]]
)
def test_a_turn_that_earned_nothing_is_a_step_as_any_other(turns, told):
    columns = packed_turns(turns)
    if not told:
        del columns["step_ends"]
    size = len(turns)
    found = compute_advantages(
        "grpo", torch.zeros(size), torch.zeros(size).long(), process_rewards=True, **columns
    )
    close(found.values, process_advantages_by_hand(turns))
    assert found.values.any()


def test_a_turn_without_a_reward_is_part_of_the_step_that_follows():
    columns = packed_turns([[0.0, 1.0], [0.0, 0.0]])
    columns["step_ends"] &= columns["token_rewards"] != 0
    columns["token_rewards"][1] = -0.5  # such as a KL penalty within the first turn
    found = compute_advantages(
        "grpo", torch.zeros(2), torch.zeros(2).long(), process_rewards=True, **columns
    )
    one = 0.5 / (0.5**0.5 * 0.5 + 1e-6) / 2  # of two steps that earned 1 − 0.5 and 0
    close(found.values, [0, one, one, 0, one, one, 0, -one, -one, 0, -one, -one])


def test_a_group_whose_turns_all_earned_nothing_is_worse_than_one_whose_turns_earned():
    columns = packed_turns([[1.0], [1.0], [0.0], [0.0]])
    groups, rewards = torch.tensor([0, 0, 1, 1]), torch.zeros(4)
    found = compute_advantages("reinforce_pp_baseline", rewards, groups, **columns).values
    white = 0.5 / (2 / 7) ** 0.5  # of 1, 1, 1, 1, 0, 0, 0, 0
    close(found, [0, white, white] * 2 + [0, -white, -white] * 2)


def test_process_rewards_of_equal_steps_or_of_a_single_rollout_are_exactly_zero():
    equal = torch.tensor([0, 0.3, 0, 0, 0, 0, 0])
    found = values("grpo", torch.tensor([0.3, 0.3]), token_rewards=equal, process_rewards=True)
    assert found.tolist() == [0.0] * 7
    alone = values("grpo", groups=torch.tensor([0, 1]), token_rewards=equal, process_rewards=True)
    assert alone.tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reinforce_pp", {}),
        ("reinforce_pp_baseline", {}),
        ("grpo", {"process_rewards": True}),
    ],
)
def test_what_is_per_token_cannot_do_without_tokens(name, options):
    with pytest.raises(InputError, match=f"'{name}' is per token: it needs mask and sequence_ids"):
        compute_advantages(name, REWARDS, GROUP, **options)


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"mask": MASK}, "mask"),
        ({"sequence_ids": ROWS}, "sequence_ids"),
        ({"token_rewards": torch.zeros(7)}, "token_rewards"),
        ({"mask": MASK, "values": torch.zeros(7)}, "mask, values"),
    ],
)
def test_columns_of_tokens_are_refused_without_mask_and_sequence_ids(columns, found):
    message = f"columns of tokens need both mask and sequence_ids, found only {found}$"
    with pytest.raises(InputError, match=message):
        compute_advantages("grpo", REWARDS, GROUP, **columns)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_reward_that_is_not_finite_takes_its_rollout_out(bad):
    spoilt = torch.tensor([0.0, 0, bad, 0, 0, 0, 0])
    found = compute_advantages("grpo", REWARDS, GROUP, token_rewards=spoilt, **TOKENS)
    assert found.keep.all(), "it is not of a sampled token"
    spoilt = torch.tensor([0.0, bad, 0, 0, 0, 0, 0])
    for name in ("grpo", "reinforce_pp"):
        found = compute_advantages(name, REWARDS, GROUP, token_rewards=spoilt, **TOKENS)
        assert found.keep.tolist() == [False, True]
        assert not found.values.any()


CRITIC = torch.tensor([math.nan, 0.5, math.inf, 0.25, 7.0, -3.0, 1.0])


def test_gae_gives_advantages_and_what_the_critic_learns():
    options = {"lam": 0.5, "gamma": 0.5, "whiten": False}
    found = compute_advantages("gae", REWARDS, GROUP, values=CRITIC, **options, **TOKENS)
    # δ of the last tokens: 1 − 0.25 and 0 − 1; of the first 0.5 · 0.25 − 0.5 = −0.375
    first = -0.375 + 0.25 * 0.75
    assert found.values.tolist() == [0, first, 0, 0.75, 0, 0, -1]
    assert found.returns.tolist() == [0, first + 0.5, 0, 1.0, 7.0, -3.0, 0.0]
    assert found.token_level
    assert found.keep.tolist() == [True, True]


def test_gae_whitens_the_advantages_and_not_the_returns():
    plain = compute_advantages("gae", REWARDS, GROUP, values=CRITIC, whiten=False, **TOKENS)
    white = compute_advantages("gae", REWARDS, GROUP, values=CRITIC, **TOKENS)
    inside = plain.values[MASK].double()
    expected = (inside - inside.mean()) / (inside.var() + 1e-8).sqrt()
    torch.testing.assert_close(white.values[MASK], expected.float())
    assert not white.values[~MASK].any()
    assert torch.equal(white.returns, plain.returns)


def test_gae_of_a_perfect_critic_is_exactly_zero():
    perfect = torch.tensor([0, 1.0, 0, 1.0, 0, 0, 0])
    assert values("gae", values=perfect).tolist() == [0.0] * 7


def test_policy_and_critic_may_have_a_lambda_each():
    critic = CRITIC.nan_to_num(0.0, 0.0)
    final = torch.tensor([0, 0, 0, 1.0, 0, 0, 0])
    both = compute_advantages(
        "gae", REWARDS, GROUP, values=critic, lam=0.5, lam_values=1.0, whiten=False, **TOKENS
    )
    policy, _ = gae(final, critic, MASK, ROWS, gamma=1.0, lam=0.5)
    _, targets = gae(final, critic, MASK, ROWS, gamma=1.0, lam=1.0)
    assert torch.equal(both.values, policy)
    assert torch.equal(both.returns, targets)
    assert targets[MASK].tolist() == [1, 1, 0]


def test_a_length_adaptive_lambda_is_of_the_policy_alone_and_counts_sampled_tokens():
    critic, alpha = CRITIC.nan_to_num(0.0, 0.0), 0.75
    final = torch.tensor([0, 0, 0, 1.0, 0, 0, 0])
    found = compute_advantages(
        "gae", REWARDS, GROUP, values=critic, length_adaptive=alpha, whiten=False, lam=1, **TOKENS
    )
    policy, _ = gae(final, critic, MASK, ROWS, gamma=1.0, lam=torch.tensor([1 - 1 / 1.5, 0.0]))
    torch.testing.assert_close(found.values, policy)
    assert found.returns[MASK].tolist() == [1, 1, 0]


def test_a_rollout_that_was_cut_off_goes_on_at_the_value_after_its_last_token():
    cut = torch.tensor([True, False])
    options = {"values": CRITIC, "lam": 1.0, "whiten": False, "truncated": cut}
    without = values("gae", **options)
    options |= {"bootstrap_truncated": True, "end_values": torch.tensor([0.625, 9.0])}
    found = values("gae", **options)
    assert without[MASK].tolist() == [0.5, 0.75, -1.0]
    assert found[MASK].tolist() == [1.125, 1.375, -1.0]
    for missing in ("truncated", "end_values"):
        with pytest.raises(InputError, match="'gae' needs truncated and end_values"):
            values("gae", **{**options, missing: None})


def test_a_value_that_is_not_finite_on_a_sampled_token_ends_the_training():
    with pytest.raises(TrainingDiverged, match="values that are not finite"):
        values("gae", values=torch.full((7,), math.nan))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_rollouts_without_a_sampled_token_are_finite(name):
    options = {
        "lengths": torch.tensor([0, 0]),
        "baseline_rewards": REWARDS,
        "reward_parts": {"all": REWARDS},
        "values": torch.zeros(7),
        "mask": torch.zeros(7, dtype=torch.bool),
        "sequence_ids": ROWS,
    }
    found = compute_advantages(name, REWARDS, GROUP, **options)
    assert torch.isfinite(found.values).all()
    if found.token_level:
        assert not found.values.any()
