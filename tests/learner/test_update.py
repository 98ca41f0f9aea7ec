"""One batch through an engine: invariances of the gradient, statistics, refusals."""

import dataclasses
import json
import math

import pytest
import torch
from rollouts import PlainEngine, columns_of, group, random_groups, rollout, with_each

from learner.config.learner import LearnerConfig
from learner.diagnostics.batch_report import BatchReport
from learner.update import Updater
from queues.records import TurnReward


def train(groups, *, version=0, **settings):
    """Run one update; return the gradient and the statistics."""
    engine = PlainEngine()
    updater = Updater(engine, LearnerConfig(**{"microbatch_tokens": 64, **settings}))
    statistics = updater.update(groups, version)
    return engine.gradient, statistics


def on_policy(groups):
    """Return the same groups with the behaviour log-probs of the engine's own weights."""
    policy = PlainEngine().policy

    def own(one):
        scores = policy(*columns_of(one))[0]
        scores = torch.where(torch.tensor(one.loss_mask), scores, 0.0)
        return {"behavior_logprobs": scores.tolist()}

    return with_each(groups, own)


def aged(groups, *, newest, oldest_trained=None):
    """Return groups with tokens of many versions, those that are too old masked out."""

    def older(one):
        versions = [
            max(0, newest - (at + one.sample_index) % 6) if sampled else -1
            for at, sampled in enumerate(one.loss_mask)
        ]
        oldest = 0 if oldest_trained is None else oldest_trained
        return {"versions": versions, "loss_mask": [version >= oldest for version in versions]}

    return with_each(groups, older)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("limit", [0, 2])
def test_tokens_that_lag_too_much_train_as_little_as_if_they_were_masked_by_hand(loss, limit):
    groups, version = random_groups(), 9
    settings = {"loss": loss, "correction": "tis" if loss == "reinforce" else "none"}
    if loss == "gspo":
        settings["aggregation"] = "sequence_mean"
    by_hand, expected = train(
        aged(groups, newest=version, oldest_trained=version - limit), version=version, **settings
    )
    gradient, found = train(
        aged(groups, newest=version), version=version, max_token_lag=limit, **settings
    )
    assert torch.equal(gradient, by_hand)
    assert dataclasses.replace(found, tokens_too_old=None) == expected
    assert found.max_lag == limit
    everything, whole = train(aged(groups, newest=version), version=version, **settings)
    assert found.tokens_too_old == whole.tokens_trained - found.tokens_trained > 0
    assert not torch.equal(gradient, everything)


def test_the_gradient_is_that_of_the_formula():
    groups = random_groups(count=1)
    engine = PlainEngine()
    rewards = torch.tensor([one.reward for one in groups[0].rollouts], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one, advantage in zip(groups[0].rollouts, advantages, strict=True):
        logprobs = engine.policy(*columns_of(one))[0][2:]
        ratio = (logprobs.detach() - torch.tensor(list(one.behavior_logprobs))[2:]).exp()
        total = total - (ratio.clamp(max=5.0) * advantage * logprobs).sum()
        tokens += len(logprobs)
    (total / tokens).backward()
    engine.step()
    torch.testing.assert_close(train(groups)[0], engine.gradient, atol=1e-6, rtol=1e-6)


def test_a_batch_that_is_masked_out_is_finite_and_leaves_the_weights():
    groups = [group("a", [rollout([1, 2, 3], reward=math.nan)])]
    gradient, statistics = train(groups)
    assert gradient is None, "no step was taken"
    assert (statistics.loss, statistics.tokens_trained) == (0.0, 0)
    assert statistics.ess is None
    assert statistics.max_lag is None
    assert statistics.unscored == 1


def test_the_loss_falls_on_the_batch_that_was_trained():
    engine = PlainEngine(learning_rate=0.5)
    updater = Updater(engine, LearnerConfig(loss="reinforce"))
    groups = on_policy(random_groups())
    losses = [updater.update(groups, 0).loss for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_statistics_describe_the_batch():
    first = [
        rollout([1, 2, 3, 4], reward=1.0, versions=5, index=0),
        rollout([1, 2, 3, 4, 5], reward=0.0, versions=[4, 5, 5], index=1),
    ]
    second = [
        rollout([1, 2, 3], reward=1.0, versions=3, index=0, reward_parts={"task": 1.0}),
        rollout([1, 2, 3], reward=1.0, versions=5, index=1, reward_parts={"task": 0.5}),
    ]
    groups = [group("a", first), group("b", second)]
    _, found = train(groups, version=5, microbatch_tokens=16)
    assert found.learning_rate == PlainEngine().learning_rate
    assert found.reward_parts == {"task": 0.75}
    row = json.loads(json.dumps(found.to_dict()))
    assert row == found.to_dict()
    assert row["lag_histogram"] == {"0": 5, "1": 1, "2": 1}
    assert row["tokens_crossed"] == 3
    assert BatchReport.from_dict(row) == found
    assert found.reward_mean == 0.75
    assert (found.groups, found.tied_groups) == (2, 1)
    assert found.tokens_trained == 7
    assert found.rollouts_trained == 4
    assert found.response_length_mean == 7 / 4
    assert found.multi_version_rollouts == 1
    assert found.lag_histogram == {0: 5, 1: 1, 2: 1}
    assert found.group_lag_histogram == {1: 1, 2: 1}
    assert found.max_lag == 2
    assert found.lag_mean == pytest.approx(3 / 7)
    tokens = {origin: figures.tokens for origin, figures in found.origins.items()}
    assert tokens == {"fresh": 3, "crossed": 3, "stale": 1}
    assert found.optimizer_steps == 1
    assert found.microbatches == 1
    assert found.pack_efficiency == 15 / 16
    assert 0 < found.entropy_mean <= math.log(11)
    assert 0 < found.ess <= 1
    assert found.grad_norm > 0
    assert found.rank_imbalance == 1.0


def test_the_running_baseline_survives_between_batches():
    updater = Updater(
        PlainEngine(),
        LearnerConfig(advantage="reinforce", advantage_options={"baseline": "ema"}),
    )
    updater.update(random_groups(), 0)
    assert updater.objective.state["ema_weight"] == pytest.approx(0.05)
    updater.update(random_groups(), 1)
    assert updater.objective.state["ema_weight"] == pytest.approx(0.0975)


class CountingEngine(PlainEngine):
    """Keeps the gradient of every step, and counts forward passes without gradient."""

    def __init__(self):
        super().__init__()
        self.gradients = []
        self.without_gradient = 0

    def forward(self, token_ids, position_ids, wanted=None):
        self.without_gradient += not torch.is_grad_enabled()
        return super().forward(token_ids, position_ids, wanted)

    def step(self):
        norm = super().step()
        self.gradients.append(self.gradient)
        return norm


def train_steps(groups, **settings):
    engine = CountingEngine()
    statistics = Updater(engine, LearnerConfig(**settings)).update(groups, 0)
    return engine, statistics


def test_minibatches_and_epochs_are_optimizer_steps():
    engine, found = train_steps(random_groups(count=5), minibatches=2, epochs=3)
    assert len(engine.gradients) == found.optimizer_steps == engine.steps_taken == 6
    assert found.grad_norm == pytest.approx(sum(float(g.norm()) for g in engine.gradients) / 6)
    once = train_steps(random_groups(count=5))[1]
    assert found.tokens_trained == once.tokens_trained
    assert found.rollouts_trained == once.rollouts_trained
    for origin in ("stale", "fresh"):
        tokens = found.origins[origin].tokens
        assert tokens == once.origins[origin].tokens
    assert found.fractions["not_finite"] == 0
    assert found.ess == pytest.approx(once.ess)


def test_the_loss_is_a_mean_over_the_minibatches_that_there_are():
    groups = random_groups(count=2)
    many, asked = train_steps(groups, minibatches=5)
    two, found = train_steps(groups, minibatches=2)
    assert many.steps_taken == two.steps_taken == 2
    assert found.loss != 0
    assert (asked.loss, asked.policy_loss) == (found.loss, found.policy_loss)


def test_rewards_are_reported_with_what_turns_earned():
    first = rollout([1, 2, 3, 4], reward=2.0)
    first = dataclasses.replace(first, turn_rewards=[TurnReward(2, 0.5)])
    groups = [group("a", [first, rollout([1, 2, 3, 4], reward=1.0, index=1)])]
    for process_rewards in (False, True):
        _, found = train_steps(groups, process_rewards=process_rewards)
        assert found.reward_mean == 1.5
        assert found.reward_std == pytest.approx(0.5**0.5)


def test_training_a_batch_again_is_the_same():
    runs = [train_steps(random_groups(count=4), minibatches=3, epochs=2) for _ in range(2)]
    assert runs[0][1] == runs[1][1]
    for one, other in zip(runs[0][0].gradients, runs[1][0].gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 0),
        ({"epochs": 2}, 1),
        ({"minibatches": 2}, 1),
        ({"recompute_proximal": True}, 1),
        ({"epochs": 2, "recompute_proximal": False}, 0),
        ({"epochs": 2, "loss": "reinforce", "correction": "tis"}, 0),
    ],
)
def test_the_proximal_policy_is_computed_once_where_a_batch_takes_several_steps(settings, passes):
    engine, _ = train_steps(random_groups(), microbatch_tokens=10_000, **settings)
    assert engine.without_gradient == passes


def test_the_decoupled_objective_weighs_by_proximal_over_behavior_and_clips_at_the_proximal():
    groups = random_groups()
    options = {"correction": "tis", "correction_options": {"cap": 2.0}}
    one, _ = train_steps(groups, loss="reinforce", **options)
    other, found = train_steps(groups, loss="ppo", recompute_proximal=True, **options)
    assert one.gradient.norm() > 1e-3
    torch.testing.assert_close(other.gradient, one.gradient, atol=1e-6, rtol=1e-6)
    assert found.fractions["truncated"] > 0
    assert found.fractions["clip_high"] == found.fractions["clip_low"] == 0


def test_a_ratio_to_the_proximal_policy_alone_does_not_correct_staleness():
    groups = random_groups()
    decoupled, _ = train_steps(groups, loss="cispo", recompute_proximal=True)
    uncorrected, _ = train_steps(groups, loss="reinforce")
    torch.testing.assert_close(decoupled.gradient, uncorrected.gradient, atol=1e-6, rtol=1e-6)


def test_the_second_step_moves_the_ratio_away_from_one():
    _, found = train_steps(
        random_groups(), epochs=4, loss="ppo", loss_options={"clip_low": 0.0, "clip_high": 0.0}
    )
    assert found.fractions["clip_high"] + found.fractions["clip_low"] > 0


def test_truncated_weights_follow_the_current_policy_at_every_step():
    groups, steps = random_groups(), {"epochs": 3}
    one, _ = train_steps(
        groups, loss="reinforce", correction="tis", correction_options={"cap": 2.0}, **steps
    )
    other, statistics = train_steps(
        groups, loss="cispo", loss_options={"cap_high": 2.0}, recompute_proximal=False, **steps
    )
    assert statistics.fractions["capped"] > 0
    for found, expected in zip(one.gradients, other.gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
