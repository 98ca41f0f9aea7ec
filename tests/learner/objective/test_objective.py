"""The objective around the policy loss: penalties, critic, reference, what is dropped."""

import json
import math
import sys
from types import ModuleType

import pytest
import torch
from rollouts import (
    PlainEngine,
    TinyPolicy,
    columns_of,
    group,
    only,
    random_groups,
    rollout,
    with_each,
)

from headway.errors import InputError
from headway.registry import Entry, Registry
from learner.advantages import Estimate
from learner.config.learner import LearnerConfig
from learner.config.objective_rules import behavior_comparison, corrects_off_policyness
from learner.config.traits import (
    CORRECTIONS,
    ESTIMATORS,
    LOSSES,
    REJECTIONS,
    AdvantageTraits,
    CorrectionTraits,
    LossTraits,
)
from learner.diagnostics.batch_report import BatchReport
from learner.engine.protocol import Forward
from learner.losses import TokenLoss
from learner.losses.kl import kl_loss
from learner.objective.checks import check_objective
from learner.objective.objective import Objective
from learner.update import Updater
from queues.records import FinishReason


class PlainCritic(PlainEngine):
    """A critic of plain torch: the log-probabilities of a `TinyPolicy`, made into values."""

    def outputs(self, token_ids, position_ids):
        return (3 + self.forward(token_ids, position_ids).logprobs,)


class PlainReference:
    """A frozen `TinyPolicy`, as `reference.Reference`."""

    def __init__(self, shift=0.0):
        self.policy = TinyPolicy()
        self.mixes = []
        with torch.no_grad():
            self.policy.head.weight += shift * torch.randn(
                self.policy.head.weight.shape, generator=torch.Generator().manual_seed(1)
            )

    @torch.no_grad()
    def logprobs(self, token_ids, position_ids, wanted=None):
        return only(wanted, self.policy(token_ids, position_ids))[0]

    def refresh(self, weights, mix):
        self.mixes.append((len(list(weights)), mix))


class EntropyEngine(PlainEngine):
    """Lets entropies have a gradient, as policies do under an entropy bonus."""

    def forward(self, token_ids, position_ids, wanted=None):
        said = self.policy(token_ids, position_ids, entropy_gradient=True)
        return Forward(*only(wanted, said))


AWAY = PlainReference(shift=1.0)


def train(groups, *, reference=None, **settings):
    """Run one update; return the engine and its statistics."""
    engine = PlainEngine()
    statistics = Updater(engine, LearnerConfig(**settings), reference=reference).update(groups, 0)
    row = json.loads(json.dumps(statistics.to_dict()))
    assert BatchReport.from_dict(row) == statistics
    return engine, statistics


def learn(critic, *, version=0, **settings):
    """As `train`, with a critic and its settings."""
    engine, config = PlainEngine(), LearnerConfig(advantage="gae", critic=settings)
    return engine, Updater(engine, config, critic=critic).update(random_groups(), version)


PAIRS = {"advantage": "best_worst", "loss": "dpo", "aggregation": "sequence_mean"}
KL = {"kl": {"coefficient": 0.5}}
IN_REWARD = {"coefficient": 0.5, "placement": "reward"}


def test_the_gradient_at_the_reference_has_no_pull_and_away_from_it_points_back():
    groups = random_groups()
    plain, _ = train(groups)
    at, none = train(groups, reference=PlainReference(), **KL)
    torch.testing.assert_close(at.gradient, plain.gradient, atol=1e-6, rtol=1e-6)
    assert none.reference_kl == pytest.approx(0.0, abs=1e-6)
    away, some = train(groups, reference=AWAY, **KL)
    assert some.reference_kl > 0.01
    assert some.loss > some.policy_loss
    far, _ = train(groups, reference=AWAY, kl={"coefficient": 1.0})
    pull, twice = away.gradient - plain.gradient, far.gradient - plain.gradient
    torch.testing.assert_close(twice, 2 * pull, atol=1e-6, rtol=1e-5)


def test_kl_in_the_reward_is_taken_off_before_the_baseline_and_adds_no_term():
    groups = random_groups()
    _, found = train(groups, reference=AWAY, kl=IN_REWARD)
    _, plain = train(groups)
    assert found.loss == found.policy_loss != plain.policy_loss
    assert found.reward_mean == plain.reward_mean
    assert found.policy_loss == pytest.approx(loss_by_hand(groups, beta=0.5), abs=1e-6)
    assert plain.policy_loss == pytest.approx(loss_by_hand(groups, beta=0.0), abs=1e-6)


def loss_by_hand(groups, *, beta):
    """Of cispo with grpo on rewards less β · Σ (log μ − log ref) of each rollout."""
    policy, total, tokens = TinyPolicy(), 0.0, 0
    for item in groups:
        rewards, terms = [], []
        for one in item.rollouts:
            ids = columns_of(one)
            sampled = torch.tensor(one.behavior_logprobs, dtype=torch.float64)[2:]
            current = policy(*ids)[0].detach()[2:]
            rewards.append(one.reward - beta * (sampled - AWAY.logprobs(*ids)[2:]).sum())
            terms.append(((current - sampled).exp().clamp(max=5.0) * current).sum())
            tokens += len(current)
        rewards = torch.stack(rewards) if beta else torch.tensor(rewards, dtype=torch.float64)
        tied = rewards.max() - rewards.min() < 1e-8
        advantages = 0 * rewards if tied else (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        total -= float((advantages * torch.stack(terms)).sum())
    return total / tokens


@pytest.fixture
def batches(monkeypatch):
    """Return a list of the batches that advantages are computed for, with them."""
    kept, compute = [], Objective.with_advantages

    def keep(self, batch):
        kept.append(compute(self, batch))
        return kept[-1]

    monkeypatch.setattr(Objective, "with_advantages", keep)
    return kept


@pytest.mark.parametrize("proximal", [True, False])
def test_kl_in_the_reward_is_of_the_proximal_policy_where_it_is_computed(proximal, batches):
    groups = random_groups()
    settings = {"advantage": "dr_grpo", "loss": "ppo", "recompute_proximal": proximal}
    train(groups, reference=AWAY, kl=IN_REWARD, **settings)
    policy, expected = TinyPolicy(), []
    for item in groups:
        rewards = []
        for one in item.rollouts:
            ids = columns_of(one)
            sampled = torch.tensor(one.behavior_logprobs, dtype=torch.float64)
            logprobs = policy(*ids)[0].detach() if proximal else sampled
            distance = (logprobs - AWAY.logprobs(*ids))[2:].sum()
            rewards.append(one.reward - 0.5 * float(distance))
        expected += [reward - sum(rewards) / len(rewards) for reward in rewards]
    assert batches[0].advantages.values.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_distance_that_is_only_measured_has_no_gradient(monkeypatch):
    asked = []

    def seen(form, inputs, *, cap):
        asked.append(inputs.logprobs.requires_grad)
        return kl_loss(form, inputs, cap=cap)

    monkeypatch.setattr("learner.objective.objective.kl_loss", seen)
    for placement in ("loss", "reward"):
        kl = {"coefficient": 0.5, "placement": placement}
        _, found = train(random_groups(), reference=AWAY, kl=kl)
        assert found.reference_kl > 0.01
        assert found.fractions["reference_not_finite"] == 0
    assert asked == [True, False]


class SharedEngine(PlainEngine):
    """A policy with a value head, which counts its forward passes without gradient."""

    without_gradient = 0

    def forward(self, token_ids, position_ids, wanted=None):
        self.without_gradient += not torch.is_grad_enabled()
        logprobs, entropies = self.policy(token_ids, position_ids)
        return Forward(*only(wanted, (logprobs, entropies)), 3 + logprobs)


@pytest.mark.parametrize("proximal", [True, False])
def test_one_pass_gives_the_proximal_policy_and_the_values_of_a_shared_critic(proximal, batches):
    engine = SharedEngine()
    config = LearnerConfig(advantage="gae", critic={"shared": True}, recompute_proximal=proximal)
    Updater(engine, config).update(random_groups(), 0)
    assert engine.without_gradient == 1
    tokens = batches[0].tokens
    assert (tokens.proximal_logprobs is not None) == proximal
    policy = TinyPolicy()(tokens.token_ids, tokens.position_ids)[0].detach().float()
    torch.testing.assert_close(tokens.values, 3 + policy)
    if proximal:
        sampled = tokens.versions >= 0
        torch.testing.assert_close(tokens.proximal_logprobs[sampled], policy[sampled])


def cut_short(groups):
    """Return the groups with the first rollout of each marked as cut off."""
    first = [FinishReason.LENGTH, *[FinishReason.STOP] * 9]
    return with_each(groups, lambda one: {"finish_reason": first[one.sample_index]})


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": IN_REWARD, "advantage": "reinforce_pp"},
        {"advantage": "gae", "critic": {}, "advantage_options": {"gamma": 0.9}},
    ],
    ids=["kl", "critic"],
)
def test_advantages_do_not_depend_on_which_rollouts_are_masked_out(settings, batches):
    for masked in (False, True):
        config = LearnerConfig(mask_truncated=masked, **settings)
        models = {"critic": PlainCritic()} if config.critic else {"reference": AWAY}
        Updater(PlainEngine(), config, **models).update(cut_short(random_groups()), 0)
    plain, masked = batches
    assert masked.tokens.mask.sum() < plain.tokens.mask.sum()
    assert torch.equal(masked.advantages.values, plain.advantages.values)


def test_an_adaptive_coefficient_follows_the_measured_kl_and_is_state():
    config = LearnerConfig(kl={"coefficient": 0.1, "target": 1e-3, "horizon": 12})
    updater = Updater(PlainEngine(), config, reference=AWAY)
    first = updater.update(random_groups(), 0)
    second = updater.update(random_groups(), 1)
    assert first.kl_coefficient == 0.1
    assert second.kl_coefficient == pytest.approx(0.1 * 1.2)
    other = Objective(config)
    other.state.update(updater.objective.state)
    assert other.kl_coefficient == updater.objective.kl_coefficient


def test_coefficients_stay_while_the_critic_alone_is_trained():
    config = LearnerConfig(
        advantage="gae",
        critic={"pretrain_batches": 1},
        kl={"coefficient": 0.1, "target": 1e-3, "horizon": 12},
        entropy={"target": 2.39, "step": 0.1},
    )
    updater = Updater(EntropyEngine(), config, critic=PlainCritic(), reference=AWAY)
    found = [updater.update(random_groups(), version) for version in range(3)]
    assert [one.kl_coefficient for one in found] == pytest.approx([0.1, 0.1, 0.12])
    assert [one.entropy_coefficient for one in found] == pytest.approx([0.0, 0.0, 0.1])


def test_the_reference_is_refreshed_at_the_versions_asked_for():
    reference = PlainReference()
    kl = {"coefficient": 0.1, "refresh_every": 3, "refresh_mix": 0.6}
    updater = Updater(PlainEngine(), LearnerConfig(kl=kl), reference=reference)
    counts = []
    for version in range(6):
        updater.update(random_groups(), version)
        counts.append(len(reference.mixes))
    assert counts == [0, 0, 1, 1, 1, 2]
    assert reference.mixes[0] == (2, 0.6)


def test_an_entropy_bonus_raises_entropy():
    flat = [group("a", [rollout([1, 2, 3, 4], reward=0.5, index=i) for i in range(2)])]
    engine = EntropyEngine(learning_rate=0.5)
    config = LearnerConfig(entropy={"coefficient": 1.0})
    updater = Updater(engine, config)
    entropies = [updater.update(flat, version).entropy_mean for version in range(3)]
    assert entropies[0] < entropies[1] < entropies[2] <= math.log(11)


def test_an_adaptive_entropy_bonus_grows_below_its_target():
    config = LearnerConfig(entropy={"target": 2.39, "step": 0.1})
    updater = Updater(EntropyEngine(), config)
    found = [updater.update(random_groups(), v).entropy_coefficient for v in range(3)]
    assert found == pytest.approx([0.0, 0.1, 0.2])
    updater.objective.state["entropy"] = 2.4
    assert updater.objective.entropy_coefficient == 0.0, "it rests above its target"


@pytest.mark.parametrize("budget", [16, 40, 10_000])
def test_positive_examples_are_a_mean_over_all_of_their_tokens(budget):
    groups = random_groups()
    plain, _ = train(groups, microbatch_tokens=budget)
    both, found = train(groups, microbatch_tokens=budget, positive_nll=0.5)
    policy = TinyPolicy()
    right = [one for item in groups for one in item.rollouts if one.reward > 0]
    nll = torch.cat([-policy(*columns_of(one))[0][2:] for one in right]).mean()
    assert found.loss - found.policy_loss == pytest.approx(0.5 * nll.item(), rel=1e-6)
    assert (both.gradient - plain.gradient).norm() > 1e-3
    of_right = sum(len(one.token_ids) - 2 for one in right)
    assert found.fractions["positive"] == pytest.approx(of_right / found.tokens_trained)


def test_gae_trains_a_critic_beside_the_policy():
    critic = PlainCritic()
    engine, found = learn(critic)
    assert engine.steps_taken == critic.steps_taken == 1
    assert found.critic.value_loss > 0
    assert found.critic.critic_grad_norm > 0
    assert found.critic.explained_variance < 1


def test_a_critic_learns_to_explain_the_returns_of_a_batch():
    critic = PlainCritic(learning_rate=0.5)
    config = LearnerConfig(advantage="gae", critic={"clip": None})
    updater = Updater(PlainEngine(learning_rate=0.0), config, critic=critic)
    losses = [updater.update(random_groups(), 0).critic.value_loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_value_pretraining_leaves_the_policy_alone():
    critic = PlainCritic()
    engine, found = learn(critic, version=1, pretrain_batches=2)
    assert (engine.steps_taken, critic.steps_taken) == (0, 1)
    assert found.optimizer_steps == 0
    assert found.grad_norm is None
    assert found.ess is not None
    engine, _ = learn(PlainCritic(), version=2, pretrain_batches=2)
    assert engine.steps_taken == 1


@pytest.mark.parametrize("budget", [16, 40, 10_000])
def test_pairs_lie_whole_in_a_row_whatever_its_capacity(budget):
    groups, reference = random_groups(count=5), PlainReference(shift=0.5)
    engine, found = train(groups, reference=reference, **PAIRS, microbatch_tokens=budget)
    whole, one = train(groups, reference=reference, **PAIRS, microbatch_tokens=10_000)
    torch.testing.assert_close(engine.gradient, whole.gradient, atol=1e-9, rtol=1e-9)
    assert found.loss == pytest.approx(one.loss, abs=1e-9)
    assert found.fractions["unpaired"] == 0
    assert found.rollouts_trained % 2 == 0
    assert found.dropped_rollouts == 20 - found.rollouts_trained


ALL = [
    {"advantage": name, "loss": loss, "correction": correction, "aggregation": aggregation}
    for name, loss, correction, aggregation in [
        ("grpo", "cispo", "none", "token_mean"),
        ("batch_norm", "cispo", "none", "prompt_mean"),
        ("reinforce_pp", "ppo", "none", "token_mean"),
        ("pass_at_k", "cispo", "none", "token_mean"),
        ("reinforce_pp_baseline", "dapo", "geometric_mis", "token_mean"),
        ("opo", "reinforce", "sequence_tis", "sequence_mean"),
        ("gdpo", "sapo", "none", "sequence_mean"),
        ("maxrl", "topr", "none", "sequence_mean"),
        ("batch_norm", "gspo", "none", "sequence_mean"),
        ("rloo", "gspo_token", "none", "sequence_mean"),
        ("dr_grpo", "kimi", "none", "sequence_mean"),
        ("best_of_n", "raft", "none", "sequence_mean"),
        ("grpo", "decoupled_ppo", "none", "token_mean"),
        ("grpo", "reinforce", ["mis", "veto"], "fixed_length"),
        ("grpo", "reinforce", "icepop", "token_mean"),
        ("grpo", "reinforce", "sequence_mis", "token_mean"),
    ]
]
WIDE = {
    "gspo": {"clip_low": 0.9, "clip_high": 9.0},
    "gspo_token": {"clip_low": 0.9, "clip_high": 9.0},
    "geometric_mis": {"low": 0.1, "high": 10.0},
}
"""Bounds that the made-up log-probabilities are within."""


@pytest.mark.parametrize("settings", ALL, ids=lambda s: f"{s['advantage']}-{s['loss']}")
def test_every_algorithm_has_one_gradient_for_every_micro_batching_and_order(settings):
    groups = with_each(random_groups(count=4), lambda one: {"reward_parts": {"task": one.reward}})
    settings = {
        **settings,
        "fixed_length": 12,
        "loss_options": WIDE.get(settings["loss"], {}),
        "correction_options": WIDE.get(str(settings["correction"]), {}),
        "advantage_options": {"k": 2} if settings["advantage"] == "pass_at_k" else {},
    }
    whole, one = train(groups, microbatch_tokens=10_000, **settings)
    assert torch.isfinite(whole.gradient).all()
    assert whole.gradient.norm() > 0
    for capacity in (16, 40):
        cut, many = train(groups, microbatch_tokens=capacity, **settings)
        torch.testing.assert_close(cut.gradient, whole.gradient, atol=1e-9, rtol=1e-7)
        assert many.loss == pytest.approx(one.loss, abs=1e-8)
        assert many.ess == pytest.approx(one.ess)
        assert many.fractions == pytest.approx(one.fractions)
        assert many.microbatches > one.microbatches == 1 or capacity > 16
    turned, _ = train(groups[::-1], **settings)
    torch.testing.assert_close(turned.gradient, whole.gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("registry", [ESTIMATORS, LOSSES, CORRECTIONS])
def test_every_function_is_where_its_entry_says(registry):
    assert all(callable(registry[name].function) for name in registry)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "topr", "correction": "tis"}, "already weighs by current / behaviour policy"),
        ({"loss": "cispo", "correction": ["veto", "mis"]}, "would count it twice"),
        ({"loss": "kimi", "correction": "tis", "aggregation": "sequence_mean"}, "unweighed"),
        (PAIRS | {"correction": "veto"}, "compares the rollouts of a group"),
        (
            {"loss": "decoupled_ppo", "loss_options": {"proximal": "detach"}, "epochs": 2},
            'use "recompute", or one step',
        ),
        ({"loss": "gspo"}, 'use aggregation = "sequence_mean"'),
        ({"advantage": "gae"}, r"needs values.*\[learner.critic\] section"),
        ({"critic": {}}, 'needs advantage = "gae"'),
        ({"loss": "dpo", "aggregation": "sequence_mean"}, 'use advantage = "best_worst"'),
        ({"correction": []}, 'an empty list; write "none"'),
        ({"advantage": "gdpo", "process_rewards": True}, "the reward of a turn belongs to none"),
        ({"correction": ["tsi"]}, "did you mean 'tis'"),
        ({"correction": ["tis", "veto", "mis"], "loss": "reinforce"}, "tis and mis each weigh"),
        ({"correction": ["veto", "veto"]}, "veto more than once"),
        ({"entropy": {}}, "give a coefficient above 0"),
        ({"advantage": "gae", "critic": {"shared": True, "path": "x"}}, "leave both out"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        LearnerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_options": {"cap": 3}}, "learner.loss_options: 'cispo' has no option cap; its"),
        ({"loss_options": {"cap_high": "5"}}, "cap_high = '5' of 'cispo': Input .* valid number"),
        ({"advantage_options": {"epsilon": True}}, "advantage_options.epsilon = True of 'grpo'"),
        (
            {"advantage": "reinforce", "advantage_options": {"baseline": "median"}},
            "baseline = 'median' .*'mean', 'leave_one_out' or 'ema'",
        ),
        ({"correction": "lag_mask"}, "correction_options: 'lag_mask' requires the option max_lag"),
        (
            {"correction": ["veto", "lag_mask"], "correction_options": {"lag_mask": 3}},
            "correction_options = 3 must be a table of options of 'lag_mask'",
        ),
        ({"correction_options": {"cap": 3.0}}, "correction_options: none has no option cap"),
        (
            {"loss": "reinforce", "correction": "tis", "correction_options": {"cap": -1}},
            "cap = -1 of",
        ),
        ({"aggregation": "fixed_length"}, "fixed_length needs max_length"),
        ({"loss": "no_module:loss"}, "cannot load loss"),
        (
            {"loss": "decoupled_ppo", "loss_options": {"proximal": ["detach"]}},
            "loss_options.proximal = .* 'recompute', 'detach'",
        ),
    ],
)
def test_an_option_that_does_not_fit_is_named_with_its_setting(settings, said):
    with pytest.raises(InputError, match=said):
        check_objective(LearnerConfig(**settings))


@pytest.mark.parametrize("correction", REJECTIONS)
def test_a_rejection_goes_with_a_loss_that_owns_its_ratio(correction):
    options = {"lag_mask": {"max_lag": 1}, "kl_mask": {"threshold": 1.0}}.get(correction, {})
    config = LearnerConfig(loss="cispo", correction=correction, correction_options=options)
    Objective(config)


@pytest.fixture
def of_the_users(monkeypatch):
    """Make an entry known by a dotted path."""
    module = ModuleType("objective_of_a_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def known(entry):
        setattr(module, entry.name, entry)
        return f"{module.__name__}:{entry.name}"

    return known


def test_a_weight_of_the_users_beside_another_is_refused(of_the_users):
    own = of_the_users(Entry("own", CORRECTIONS["tis"].function, CorrectionTraits()))
    with pytest.raises(InputError, match=f"mis and {own} each weigh"):
        Objective(LearnerConfig(loss="reinforce", correction=["mis", own]))
    Objective(LearnerConfig(loss="reinforce", correction=[own, "veto"]))


def push(inputs):
    return TokenLoss(-inputs.current, {})


@pytest.mark.parametrize(
    ("need", "remedy", "settings"),
    [
        ("reference_logprobs", r"give a \[learner.kl\] section", {"kl": {}}),
        ("proximal_logprobs", "recompute_proximal = true", {"recompute_proximal": True}),
    ],
)
def test_what_a_loss_of_the_users_needs_is_asked_for(of_the_users, need, remedy, settings):
    needy = Entry("needy", push, LossTraits(owns_is=False, needs=frozenset({need})))
    loss = of_the_users(needy)
    with pytest.raises(InputError, match=f"needs {need}, which nothing computes; .*{remedy}"):
        Objective(LearnerConfig(loss=loss))
    Objective(LearnerConfig(loss=loss, **settings))
    traits = CorrectionTraits(weighs=False, needs=frozenset({need}))
    correction = of_the_users(Entry("own", CORRECTIONS["none"].function, traits))
    with pytest.raises(InputError, match=f"needs {need}"):
        Objective(LearnerConfig(correction=correction, loss="reinforce"))


def test_an_advantage_of_the_users_may_have_a_critic_which_learns_what_it_returns(of_the_users):
    def with_returns(batch):
        values = batch.the_tokens("own").values
        return Estimate(values, token_level=True, returns=values)

    own = Entry("own", with_returns, AdvantageTraits(needs=frozenset({"values"})))
    advantage = of_the_users(own)
    with pytest.raises(InputError, match=r"needs values.*\[learner.critic\] section"):
        Objective(LearnerConfig(advantage=advantage))
    updater = Updater(
        PlainEngine(), LearnerConfig(advantage=advantage, critic={}), critic=PlainCritic()
    )
    assert updater.update(random_groups(), 0).critic.value_loss
    silent = of_the_users(Entry("silent", lambda batch: batch.rewards, AdvantageTraits()))
    with pytest.raises(InputError, match="a critic learns returns, and"):
        Objective(LearnerConfig(advantage=silent, critic={}))


def test_what_an_objective_needs_of_others_is_told():
    greedy = LearnerConfig(advantage="remax", loss="reinforce")
    assert greedy.traits.needs == {"baseline_rewards": "advantage"}
    assert LearnerConfig().traits.needs == {"group_size": "advantage"}
    lagged = LearnerConfig(correction="lag_mask", correction_options={"max_lag": 1})
    assert lagged.traits.needs == {
        "group_size": "advantage",
        "versions": "correction",
        "version": "correction",
    }
    best = LearnerConfig(advantage="reinforce", loss="raft", loss_options={"keep": "best"})
    assert best.traits.needs == {"group_size": "loss", "group_ids": "loss"}


def test_rules_of_staleness_follow_the_traits_of_a_loss_of_the_users(of_the_users):
    anchored = of_the_users(Entry("anchored", push, LossTraits(owns_is=True, anchor="behavior")))
    proximal = of_the_users(Entry("proximal", push, LossTraits(owns_is=True)))
    plain = of_the_users(Entry("plain", push, LossTraits(owns_is=False)))

    def compares_and_corrects(**settings):
        config = LearnerConfig(**settings)
        traits = config.traits_by(Registry.load)
        return behavior_comparison(config, traits), corrects_off_policyness(config, traits)

    assert LearnerConfig(loss=anchored, epochs=2).uses_proximal
    assert compares_and_corrects(loss=anchored, epochs=2) == ("loss", True)
    assert compares_and_corrects(loss=proximal) == ("loss", True)
    assert compares_and_corrects(loss=proximal, epochs=2) == (None, False)
    assert compares_and_corrects(loss=plain) == (None, False)
    assert compares_and_corrects(loss=plain, correction="tis") == ("correction", True)
    assert compares_and_corrects(loss=plain, kl={"form": "weighted_k2"}) == ("kl", False)
    assert compares_and_corrects(loss=plain, kl={"form": "k2"}) == (None, False)
    assert compares_and_corrects(loss=plain, kl={"placement": "reward"}) == ("kl", False)


@pytest.mark.parametrize(
    ("settings", "corrects"),
    [
        ({"loss": "cispo"}, True),
        ({"loss": "cispo", "epochs": 2}, False),
        ({"loss": "cispo", "epochs": 2, "correction": "tis"}, True),
        ({"loss": "cispo", "epochs": 2, "recompute_proximal": False}, True),
        ({"loss": "reinforce"}, False),
        ({"loss": "reinforce", "correction": "lag_mask"}, False),
        ({"loss": "decoupled_ppo", "epochs": 2}, True),
        ({"loss": "raft"}, True),
        ({"loss": "mine:loss"}, True),
        ({"loss": "mine:loss", "epochs": 2}, False),
    ],
)
def test_what_corrects_off_policyness_without_loading_anything(settings, corrects):
    config = LearnerConfig(**settings)
    assert corrects_off_policyness(config, config.traits) == corrects


def test_weights_of_the_parts_of_a_reward_are_accepted():
    Objective(LearnerConfig(advantage="gdpo", advantage_options={"weights": {"task": 1, "x": 2}}))


def test_missing_inputs_of_an_estimator_are_named():
    with pytest.raises(InputError, match=r"remax.*needs baseline_rewards"):
        train(random_groups(), advantage="remax", loss="reinforce")
