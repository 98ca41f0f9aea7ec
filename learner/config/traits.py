"""The functions that an objective names: their places, properties and needs. Imports no torch.

The built-in ones are listed below; a function of the user's passes its traits to the
decorator. `learner.config.objective_rules` checks objectives by traits alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.registry import Entry, Registry, Traits

Anchor = Literal["proximal", "behavior"]
Unit = Literal["token", "sequence", "group"]


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Properties and needs of a policy loss."""

    owns_is: bool
    """It weighs tokens by current / anchor itself. Where the anchor is the behaviour policy, an
    importance weight on top would count the ratio twice."""
    anchor: Anchor = "proximal"
    """`proximal`: the proximal policy where one is computed, else the behaviour policy.
    `behavior`: the behaviour policy always."""
    off_policy: bool = False
    """True if stale rollouts need no correction, whatever the anchor."""
    unit: Unit = "token"
    """The unit that must lie whole in one microbatch: a path of a rollout, the rollout, a group."""
    aggregations: tuple[str, ...] | None = None
    """Modes of `learner.batch.token_weights` that the loss is defined for; None: all."""
    advantages: tuple[str, ...] | None = None
    """Built-in advantages that the loss is defined for; None: all."""
    needs: Collection[str] = ()
    """Optional fields of `LossInputs` that it cannot do without."""
    recomputes_proximal: bool | None = None
    """True if the proximal policy is computed for it; None: as the recipe has it."""
    single_step: bool = False
    """True if it is right only where a batch takes one optimizer step."""
    by_option: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    """Option → value → the traits that differ from the above under this value."""

    def under(self, options: Mapping[str, Any]) -> "LossTraits":
        """Return the traits of the loss when it is used with these options."""
        changes: dict[str, Any] = {}
        for option, values in self.by_option.items():
            for value, changed in values.items():
                if options.get(option) == value:
                    changes |= changed
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits:
    """Properties and needs of an advantage estimator."""

    needs: Collection[str] = ()
    """Members of `ADVANTAGE_NEEDS` that it cannot do without."""
    relative: bool = False
    """It compares the rollouts of a group with each other alone, so that neither a group of one nor
    one of equal rewards teaches anything."""
    takes_token_rewards: bool = False
    """It places token rewards itself; else they are added to the rollout's reward."""
    takes_task_rewards: bool = False
    """It is given the reward of the task itself, without shaping and with what turns earned: parts,
    counts and thresholds of a reward do not survive a penalty in it."""
    ties_teach: str | None = None
    """Reason why a group of equal rewards has a gradient although `relative`; None: it has none."""
    ties_teach_with: Mapping[str, str] = field(default_factory=dict)
    """Option → the same reason, where the option is given."""
    set_size: tuple[str, int] | None = None
    """Option with the size of the sets in a group that it compares, and its default."""
    lone_rollout_with: tuple[str, str] | None = None
    """Option and value without which a batch of one rollout teaches nothing; None: not so."""


@dataclass(frozen=True, kw_only=True)
class CorrectionTraits:
    """Properties and needs of a correction."""

    weighs: bool = True
    """It multiplies by a ratio; false: it only rejects, which counts no ratio twice."""
    corrects: bool = True
    """It accounts for the difference between behaviour and proximal policy."""
    unit: Unit = "sequence"
    """The unit that must lie whole in one microbatch."""
    needs: Collection[str] = ()
    """Optional fields of `LossInputs` that it cannot do without."""


ADVANTAGE_NEEDS = frozenset({"lengths", "baseline_rewards", "reward_parts", "values"})
"""Optional columns of rollouts and tokens that an estimator may declare a need for."""


def _entry(place: str, traits: Traits, *, name: str = "") -> Entry[Traits]:
    """Return the entry of a function at a "module:function" of this package, under its own name."""
    return Entry(name or place.partition(":")[2], f"learner.{place}", traits)


_GROUP, _BATCH = AdvantageTraits(relative=True), AdvantageTraits()
_OF_TOKENS = AdvantageTraits(takes_token_rewards=True)
_OF_TASK = replace(_GROUP, takes_task_rewards=True)
_OF_PARTS = replace(
    _OF_TASK,
    needs=frozenset({"reward_parts"}),
    takes_token_rewards=True,
    ties_teach="which compares each part of the reward, and parts may differ where sums do not",
)
_ACCEPTS = {"min_reward": "which takes rollouts whose reward reaches min_reward"}

ESTIMATORS = Registry(
    "advantage",
    "module:function",
    AdvantageTraits,
    _entry(
        "advantages.reinforce:reinforce", replace(_BATCH, lone_rollout_with=("baseline", "ema"))
    ),
    _entry("advantages.centred:rloo", _GROUP),
    _entry("advantages.grpo:grpo", replace(_OF_TOKENS, relative=True)),
    _entry("advantages.centred:dr_grpo", _GROUP),
    _entry("advantages.centred:batch_norm", _GROUP),
    _entry("advantages.to_go:reinforce_pp_baseline", replace(_OF_TOKENS, relative=True)),
    _entry("advantages.centred:opo", replace(_GROUP, needs=frozenset({"lengths"}))),
    _entry("advantages.gdpo:gdpo", _OF_PARTS),
    _entry("advantages.centred:maxrl", _OF_TASK),
    _entry("advantages.pass_at_k:pass_at_k", replace(_OF_TASK, set_size=("k", 4))),
    _entry("advantages.best:best_of_n", replace(_GROUP, ties_teach_with=_ACCEPTS)),
    _entry("advantages.best:best_worst", _GROUP),
    _entry("advantages.to_go:reinforce_pp", _OF_TOKENS),
    _entry("advantages.to_go:remax", replace(_OF_TOKENS, needs=frozenset({"baseline_rewards"}))),
    _entry("advantages.gae:gae", replace(_OF_TOKENS, needs=frozenset({"values"}))),
    decorated=True,
)

_RATIO, _NO_RATIO = LossTraits(owns_is=True), LossTraits(owns_is=False)
_OF_SEQUENCES = ("sequence_mean",)
_SEQUENCE_RATIO = replace(_RATIO, unit="sequence", aggregations=_OF_SEQUENCES)
_OF_BEHAVIOR = replace(_RATIO, anchor="behavior", off_policy=True)
_TAPERED = replace(_OF_BEHAVIOR, unit="sequence", by_option={"level": {"token": {"unit": "token"}}})
_BY_VERSION = {"recomputes_proximal": False, "needs": frozenset({"versions", "version"})}
_DETACHED = {"recomputes_proximal": False, "needs": frozenset(), "single_step": True}
_DECOUPLED = replace(
    _OF_BEHAVIOR,
    needs=frozenset({"proximal_logprobs"}),
    recomputes_proximal=True,
    by_option={"proximal": {"detach": _DETACHED, "loglinear": _BY_VERSION, "linear": _BY_VERSION}},
)
_NEAR_BEHAVIOR = replace(
    _SEQUENCE_RATIO,
    owns_is=False,
    anchor="behavior",
    off_policy=True,
    by_option={"variant": {"token_sq": {"unit": "token", "aggregations": None}}},
)
_IMITATION = replace(
    _NO_RATIO,
    off_policy=True,
    by_option={"keep": {"best": {"unit": "group", "needs": frozenset({"group_ids"})}}},
)
_PAIRS = replace(
    _NO_RATIO,
    off_policy=True,
    unit="group",
    aggregations=_OF_SEQUENCES,
    advantages=("best_worst",),
    needs=frozenset({"reference_logprobs", "group_ids"}),
)

LOSSES = Registry(
    "loss",
    "module:function",
    LossTraits,
    _entry("losses.reinforce:reinforce", _NO_RATIO),
    _entry("losses.ppo:ppo", _RATIO),
    _entry("losses.ppo:ppo", _RATIO, name="grpo"),
    _entry("losses.ppo:dapo", _RATIO),
    _entry("losses.cispo:cispo", _RATIO),
    _entry("losses.gspo:gspo", _SEQUENCE_RATIO),
    _entry("losses.gspo:gspo_token", _SEQUENCE_RATIO),
    _entry("losses.sapo:sapo", _RATIO),
    _entry("losses.topr:topr", _TAPERED),
    _entry("losses.decoupled_ppo:decoupled_ppo", _DECOUPLED),
    _entry("losses.kimi:kimi", _NEAR_BEHAVIOR),
    _entry("losses.raft:raft", _IMITATION),
    _entry("losses.dpo:dpo", _PAIRS),
    decorated=True,
)

_WEIGHT, _REJECTION = CorrectionTraits(), CorrectionTraits(weighs=False)
_TOKEN_WEIGHT = CorrectionTraits(unit="token")
_UNCORRECTED = replace(_REJECTION, corrects=False, unit="token")
_BY_LAG = replace(_UNCORRECTED, needs=frozenset({"versions", "version"}))

CORRECTIONS = Registry(
    "correction",
    "module:function",
    CorrectionTraits,
    _entry("corrections.by_token:none", _UNCORRECTED),
    _entry("corrections.by_token:tis", _TOKEN_WEIGHT),
    _entry("corrections.by_token:mis", _TOKEN_WEIGHT),
    _entry("corrections.by_token:icepop", _TOKEN_WEIGHT),
    _entry("corrections.by_sequence:sequence_tis", _WEIGHT),
    _entry("corrections.by_sequence:sequence_mis", _WEIGHT),
    _entry("corrections.by_sequence:geometric_mis", _REJECTION),
    _entry("corrections.rejection:kl_mask", _REJECTION),
    _entry("corrections.rejection:veto", _REJECTION),
    _entry("corrections.rejection:opsm", _REJECTION),
    _entry("corrections.rejection:lag_mask", _BY_LAG),
    decorated=True,
)

WEIGHTS = tuple(name for name in CORRECTIONS if CORRECTIONS[name].traits.weighs)
"""Corrections that weigh tokens by proximal / behaviour policy."""
REJECTIONS = tuple(name for name in CORRECTIONS if name not in (*WEIGHTS, "none"))
"""Corrections that only reject, and so go with every loss."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraits:
    """Traits of the functions that an objective names, under its options.

    None stands for a function of the user's that is not loaded: rules about it are left to the
    check that loads it (`learner.objective.checks`).
    """

    advantage: AdvantageTraits | None
    loss: LossTraits | None
    corrections: Mapping[str, CorrectionTraits | None]
    """By name, without "none"."""

    @property
    def needs(self) -> dict[str, str]:
        """Needs of the loaded functions, each with the setting that names such a function.

        Fields of `LossInputs`, members of `ADVANTAGE_NEEDS`, and `group_size` to compare rollouts.
        """
        corrections = [traits for traits in self.corrections.values() if traits is not None]
        needs = {need: "correction" for traits in corrections for need in traits.needs}
        if self.loss is not None:
            of_groups = ("group_size",) if self.loss.unit == "group" else ()
            needs |= dict.fromkeys((*self.loss.needs, *of_groups), "loss")
        if self.advantage is not None:
            relative = ("group_size",) if self.advantage.relative else ()
            needs |= dict.fromkeys((*self.advantage.needs, *relative), "advantage")
        return needs
