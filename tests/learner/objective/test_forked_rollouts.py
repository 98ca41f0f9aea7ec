"""A rollout whose history forks trains as its paths do alone, each with its own tokens only."""

from dataclasses import replace

import pytest
import torch
from forked_rollouts import alone, forked_groups, trees
from hypothesis import given
from hypothesis import strategies as st
from rollouts import PlainEngine, columns_of, group, rollout

from headway.errors import HeadwayError
from learner.advantages import compute_advantages
from learner.batch.batch import read_batch
from learner.config.learner import LearnerConfig
from learner.corrections import importance_weights
from learner.losses import LossInputs, policy_loss
from learner.objective.objective import Objective
from learner.update import Updater
from queues.records import FinishReason, Segment
from tests.property_examples import costly

CAPACITIES = st.sampled_from([16, 20, 200])
EXACT = {"rtol": 1e-9, "atol": 1e-12}
WIDE = {"clip_low": 0.9, "clip_high": 9.0}
BY_TOKEN = [
    {"loss": loss, "aggregation": aggregation, "fixed_length": 7}
    for loss in ("ppo", "cispo", "dapo")
    for aggregation in ("token_mean", "sequence_mean", "prompt_mean", "fixed_length")
]
BY_ROLLOUT = [
    {"loss": "gspo", "aggregation": "sequence_mean", "loss_options": WIDE},
    {"loss": "gspo_token", "aggregation": "sequence_mean", "loss_options": WIDE},
    {"loss": "reinforce", "correction": "sequence_tis"},
    {"loss": "reinforce", "correction": "sequence_mis"},
    {"loss": "ppo", "correction": "geometric_mis", "correction_options": {"low": 0.3, "high": 1.5}},
    {"loss": "reinforce", "correction": ("tis", "veto")},
]


class OneOfRanks(PlainEngine):
    """One rank of several, which sees the sums of its own microbatches alone."""

    def __init__(self, rank, ranks):
        super().__init__()
        self.rank, self.ranks = rank, ranks


def trained(groups, *, ranks=1, **settings):
    """Return the gradient, summed over the ranks, and the report of each rank."""
    reports, total = [], 0.0
    for rank in range(ranks):
        engine = OneOfRanks(rank, ranks)
        reports.append(Updater(engine, LearnerConfig(**settings)).update(groups, 5))
        total = total + (0.0 if engine.gradient is None else engine.gradient)
    return total, reports


def expected(groups, settings):
    """Return loss and gradient of the sampled tokens, each of a model that sees one path alone.

    The tokens of a rollout are one sequence, whichever of its paths they belong to.
    """
    config, engine = LearnerConfig(**settings), PlainEngine()
    rollouts = [(number, one) for number, item in enumerate(groups) for one in item.rollouts]
    columns = {"logprobs": [], "behavior_logprobs": [], "sequence_ids": [], "group_ids": []}
    for index, (number, one) in enumerate(rollouts):
        for path in alone(one):
            mask = torch.tensor(path.loss_mask)
            columns["logprobs"].append(engine.policy(*columns_of(path))[0][mask])
            columns["behavior_logprobs"].append(torch.tensor(path.behavior_logprobs)[mask])
            columns["sequence_ids"].append(torch.full((int(mask.sum()),), index))
            columns["group_ids"].append(torch.full((int(mask.sum()),), number))
    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    ids, of_group = joined["sequence_ids"], joined["group_ids"]
    rewards = torch.tensor([one.reward for _, one in rollouts])
    advantages = compute_advantages("grpo", rewards, torch.tensor([n for n, _ in rollouts]))
    everything = torch.ones(len(ids), dtype=torch.bool)
    inputs = LossInputs(**joined, advantages=advantages.values[ids], mask=everything)
    denominators = {
        "token_mean": torch.full((len(ids),), len(ids)),
        "sequence_mean": len(ids.unique()) * torch.bincount(ids)[ids],
        "prompt_mean": len(of_group.unique()) * torch.bincount(of_group)[of_group],
        "fixed_length": torch.full((len(ids),), len(rollouts) * 7),
    }
    weights = (1 / denominators[config.aggregation].double()).float()
    names, options = config.corrections or "none", config.correction_options
    correction = importance_weights(names, inputs, **options)
    weights = weights * torch.where(correction.keep, correction.weights, 0.0)
    loss = (weights * policy_loss(config.loss, inputs, **config.loss_options).per_token).sum()
    engine.backward(loss)
    engine.step()
    return loss.detach(), engine.gradient


@pytest.mark.parametrize(
    "settings", [*BY_TOKEN, *BY_ROLLOUT], ids=lambda s: "-".join(map(str, s.values()))
)
@costly
@given(groups=forked_groups(), capacity=CAPACITIES, ranks=st.integers(1, 3))
def test_loss_and_gradient_are_those_of_each_path_alone(settings, groups, capacity, ranks):
    loss, gradient = expected(groups, settings)
    found, reports = trained(groups, ranks=ranks, microbatch_tokens=capacity, **settings)
    total = torch.tensor(sum(report.loss for report in reports), dtype=torch.float64)
    torch.testing.assert_close(total, loss.double(), **EXACT)
    if not isinstance(found, float):
        torch.testing.assert_close(found, gradient, **EXACT)
    else:
        assert not gradient.any()


@costly
@given(groups=forked_groups(), capacity=CAPACITIES)
def test_figures_count_each_sampled_token_once_however_it_is_packed(groups, capacity):
    settings = {"loss": "cispo", "correction": "none"}
    _, [whole] = trained(groups, microbatch_tokens=10_000, **settings)
    _, [packed] = trained(groups, microbatch_tokens=capacity, **settings)
    rollouts = [one for item in groups for one in item.rollouts]
    sampled = [sum(one.loss_mask) for one in rollouts]
    assert whole.tokens_trained == packed.tokens_trained == sum(sampled)
    assert whole.rollouts_trained == sum(count > 0 for count in sampled)
    assert whole.response_length_mean == sum(sampled) / len(sampled)
    assert sum(figures.tokens for figures in packed.origins.values()) == sum(sampled)
    assert sum(whole.lag_histogram.values()) == sum(sampled)
    mixed = [len({v for v in one.versions if v >= 0}) > 1 for one in rollouts]
    assert whole.multi_version_rollouts == sum(mixed)
    for name in ("ess", "ess_sequence", "ratio_mean", "mismatch", "kl", "reward_mean"):
        assert getattr(packed, name) == pytest.approx(getattr(whole, name), rel=1e-9), name


@costly
@given(groups=forked_groups())
def test_a_batch_holds_the_columns_of_each_path_alone(groups):
    batch = read_batch(groups, process_rewards=True)
    parts = [
        replace(item, rollouts=[p for r in item.rollouts for p in alone(r)]) for item in groups
    ]
    apart = read_batch(parts, process_rewards=True)
    assert batch.lengths == apart.lengths
    assert batch.group_of_path == apart.group_of_path
    names = ("token_ids", "position_ids", "mask", "behavior_logprobs", "versions", "group_ids")
    for name in names:
        assert torch.equal(getattr(batch.tokens, name), getattr(apart.tokens, name)), name
    assert torch.equal(batch.process_rewards, apart.process_rewards)
    assert torch.equal(batch.step_ends, apart.step_ends)
    final = torch.tensor(batch.rewards.tolist())[torch.tensor(batch.rollout_of_path)]
    assert torch.equal(final.double(), apart.rewards)


@pytest.mark.parametrize(
    ("advantage", "options"),
    [
        ("gae", {"gamma": 0.9, "lam": 0.7}),
        ("gae", {"whiten": False, "lam_values": 1.0, "bootstrap_truncated": True}),
        ("gae", {"length_adaptive": 0.5}),
        ("reinforce_pp", {"gamma": 0.9}),
    ],
)
@costly
@given(
    groups=forked_groups(),
    process_rewards=st.booleans(),
    cut=st.booleans(),
    seed=st.integers(0, 99),
)
def test_advantages_of_tokens_are_those_of_each_path_as_an_episode(
    advantage, options, groups, process_rewards, cut, seed
):
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    whole = [
        replace(item, rollouts=[replace(one, finish_reason=reason) for one in item.rollouts])
        for item in groups
    ]
    apart = [replace(item, rollouts=[p for r in item.rollouts for p in alone(r)]) for item in whole]
    if not process_rewards:  # then turns earn nothing of their own
        apart = [
            replace(
                item,
                rollouts=[replace(p, reward=r.reward) for r in origin.rollouts for p in alone(r)],
            )
            for item, origin in zip(apart, whole, strict=True)
        ]
    make = torch.Generator().manual_seed(seed)
    found, values, end_values = [], None, None
    for batch_groups in (whole, apart):
        batch = read_batch(batch_groups, process_rewards=process_rewards)
        if values is None:
            values = torch.randn(len(batch.tokens.mask), generator=make)
            end_values = torch.randn(len(batch.rewards), generator=make)
            of_path = batch.rollout_of_path
        else:
            end_values = end_values[of_path]
        batch = replace(batch.with_columns(values=values), end_values=end_values)
        config = LearnerConfig(
            advantage=advantage,
            advantage_options=options,
            loss="ppo",
            process_rewards=process_rewards,
            critic={} if advantage == "gae" else None,
        )
        found.append(Objective(config).with_advantages(batch).advantages)
    torch.testing.assert_close(found[0].values, found[1].values, **EXACT)
    if advantage == "gae":
        torch.testing.assert_close(found[0].returns, found[1].returns, **EXACT)


@costly
@given(one=trees(0))
def test_a_path_must_begin_with_a_token_that_was_not_sampled(one):
    end = len(one.token_ids)
    one = rollout([*one.token_ids, 1], mask=[*one.loss_mask, True], prompt=one.prompt_length)
    with pytest.raises(HeadwayError, match="group a, sample 0: a path must begin"):
        read_batch([group("a", [replace(one, segments=(Segment(end, 0, 0),))])])


def test_paths_are_split_over_microbatches_but_where_the_loss_needs_the_whole_rollout():
    one = rollout(list(range(11)), prompt=3, reward=1.0, versions=5)
    one = replace(one, segments=(Segment(7, 0, 6), Segment(9, 1, 8)))
    groups = [group("a", [one, rollout([1, 2, 3], index=1, versions=5)])]
    by_token = trained(groups, microbatch_tokens=16, loss="ppo")[1][0]
    whole = trained(groups, microbatch_tokens=16, loss="gspo", aggregation="sequence_mean")[1][0]
    assert (by_token.microbatches, by_token.pack_efficiency) == (2, 28 / 32)
    assert (whole.microbatches, whole.pack_efficiency) == (2, 28 / 41)
