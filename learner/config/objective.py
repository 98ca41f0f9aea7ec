"""Settings of what is optimised: advantage, policy loss, corrections, KL, entropy, critic.

The traits of built-in functions stand here too, so that a recipe is judged without importing torch;
a test holds them against the registries.
"""

import difflib
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from learner.config.optimizer import OptimizerConfig, Section

GROUP_ADVANTAGES = (
    "rloo",
    "grpo",
    "dr_grpo",
    "batch_norm",
    "reinforce_pp_baseline",
    "opo",
    "gdpo",
    "maxrl",
    "pass_at_k",
    "best_of_n",
    "best_worst",
)
"""Estimators that compare the rollouts of a group."""
RAW_REWARD_ADVANTAGES = ("gdpo", "maxrl", "pass_at_k")
"""Estimators of parts, counts or thresholds, for which a penalty in the reward is meaningless: they
judge by the reward that the task itself gives, without shaping, and with what turns earned."""
ADVANTAGES = ("reinforce", *GROUP_ADVANTAGES, "reinforce_pp", "remax", "gae")

RATIO_LOSSES = ("ppo", "grpo", "dapo", "cispo", "gspo", "gspo_token", "sapo")
"""Losses with a ratio of their own: to the proximal policy where one is recomputed, else to the
behaviour policy."""
BEHAVIOR_LOSSES = ("topr", "decoupled_ppo")
"""Losses that always weigh by the behaviour policy themselves."""
OFF_POLICY_LOSSES = ("kimi", "raft", "dpo")
"""Losses that are meant for rollouts of any policy, without weights."""
LOSSES = ("reinforce", *RATIO_LOSSES, *BEHAVIOR_LOSSES, *OFF_POLICY_LOSSES)
SEQUENCE_LOSSES = ("gspo", "gspo_token", "kimi", "dpo")
"""Losses of whole sequences, which only `sequence_mean` averages as they are meant."""

WEIGHTS = ("tis", "mis", "icepop", "sequence_tis", "sequence_mis")
"""Corrections that weigh tokens by proximal / behaviour policy."""
REJECTIONS = ("geometric_mis", "kl_mask", "veto", "opsm", "lag_mask")
"""Corrections that only reject, and so go with every loss."""
CORRECTIONS = ("none", *WEIGHTS, *REJECTIONS)


class KlConfig(Section):
    """Distance to a reference policy, as a penalty. Without it no reference is loaded."""

    coefficient: float = Field(default=0.05, gt=0)
    """β; the first one where `target` adapts it."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the policy loss. `reward`: β · k1 of each token, taken off its reward
    before advantages are computed, so that credit reaches the tokens before it."""
    form: Literal["weighted_k2", "ratio_k1", "ratio_k3", "k1", "k2", "k3"] = "weighted_k2"
    """Of the term in the loss. The first three pull towards the reference for stale rollouts too,
    by the ratio current / behaviour policy; the others only for rollouts of the current policy, and
    k1 not even there. In the reward it is k1 always."""
    cap: float = Field(default=5.0, gt=1)
    """Largest ratio of `weighted_k2`."""
    target: float | None = Field(default=None, gt=0)
    """Mean KL per token that β is steered to (Ziegler et al. 2019, §2.2); None keeps β."""
    horizon: int = Field(default=10_000, ge=1)
    """Rollouts over which the controller corrects an error of 100 %."""
    reference: str | None = None
    """Model folder or hub name of the reference; None takes the run's initial model."""
    refresh_every: int | None = Field(default=None, ge=1)
    """Batches after which the reference becomes the current policy; None never."""
    refresh_mix: float = Field(default=1.0, gt=0, le=1)
    """Share of the current policy in the refreshed reference; below 1 a soft update."""


class EntropyConfig(Section):
    """An entropy bonus: −coefficient · entropy in the loss, averaged like the policy loss."""

    coefficient: float = Field(default=0.0, ge=0)
    """The first one where `target` adapts it."""
    target: float | None = Field(default=None, gt=0)
    """Mean entropy in nats below which the coefficient rises and the bonus applies, and above which
    it falls (Skywork-OR1); None keeps it."""
    step: float = Field(default=0.005, gt=0)
    """By how much it changes at each batch."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.coefficient == 0 and self.target is None:
            raise ValueError("give a coefficient above 0, or a target, or leave the section out")
        return self


class CriticConfig(OptimizerConfig):
    """A value model, which the advantage `gae` needs; with an optimizer of its own.

    What it does not say of its optimizer is as in [learner].
    """

    path: str | None = None
    """Model folder or hub name of its backbone, perhaps a reward model; None takes the run's
    initial model, with a new head."""
    shared: bool = False
    """Put the head on the policy's own backbone, trained in the same step: `coefficient` weighs its
    loss, `learning_rate` is that of the head alone."""
    coefficient: float = Field(default=0.1, gt=0)
    """Weight of the value loss where the backbone is shared."""
    clip: float | None = Field(default=0.2, gt=0)
    """Largest change of a value within a batch that its loss rewards; None switches it off."""
    pretrain_batches: int = Field(default=0, ge=0)
    """First batches, which train the critic alone (VAPO's value pre-training)."""

    @model_validator(mode="after")
    def _a_shared_one_has_no_life_of_its_own(self) -> Self:
        if self.shared and (self.path is not None or self.pretrain_batches):
            raise ValueError(
                f"critic.shared = true with path = {self.path!r} and pretrain_batches = "
                f"{self.pretrain_batches}: a head on the policy's backbone has no backbone of its "
                "own to load, and cannot be trained without it; leave both out, or shared = false"
            )
        return self


class ObjectiveConfig(Section):
    """What the learner optimises."""

    advantage: str = "grpo"
    """One of the estimators of `learner/README.md`, or "module:function"."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    loss: str = "cispo"
    """One of the policy losses of `learner/README.md`, or "module:function"."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    correction: str | tuple[str, ...] = "none"
    """An importance weight on top of the loss, or a rejection; or a list of rejections with at most
    one weight."""
    correction_options: dict[str, Any] = Field(default_factory=dict)
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_length"] = (
        "token_mean"
    )
    fixed_length: int | None = Field(default=None, ge=1)
    """Tokens that `fixed_length` divides every rollout by; None takes actors.max_new_tokens."""
    mask_truncated: bool = False
    """Leave rollouts that ended at their length limit out of the loss; their rewards stay in the
    baselines, and the rollouts in the count of `fixed_length`."""
    max_token_lag: int | None = Field(default=None, ge=0)
    """Leave tokens that lag by more versions out of the loss; None takes queues.max_staleness where
    queues.on_overdue = "mask", else there is no limit."""
    drop_tied: bool = False
    """Leave groups whose rewards are all equal out of the loss and of every denominator (ScaleRL),
    so that a batch gets smaller; `queues.filter_tied` replaces them instead."""
    process_rewards: bool = False
    """Credit each turn with its own reward, for estimators that tell tokens apart."""
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    critic: CriticConfig | None = None
    positive_nll: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the tokens of rollouts whose task gave a reward
    above `positive_reward` (VAPO); shaping does not count."""
    positive_reward: float = 0.0
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch and epoch; whole groups are split into as many parts."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch, each in another order."""
    recompute_proximal: bool | None = None
    """Compute log-probabilities with the weights at the start of each batch, the proximal policy;
    None: where a batch takes more than one optimizer step and the loss may have a ratio of its own.
    The objective is then decoupled (Hilton et al. 2021, AReaL): the loss compares with the proximal
    policy, so that it limits the steps within the batch, and `correction` weighs by proximal /
    behaviour policy, for staleness and the engine. Without a correction nothing does, so
    max_staleness > 0 is refused. false: the ratio, of the loss or of the correction, is current /
    behaviour policy at every step."""

    @field_validator("advantage", "loss")
    @classmethod
    def _known_or_dotted(cls, value: str, info: Any) -> str:
        return _known(value, {"advantage": ADVANTAGES, "loss": LOSSES}[info.field_name])

    @field_validator("correction")
    @classmethod
    def _known_corrections(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (value,) if isinstance(value, str) else value:
            _known(name, CORRECTIONS)
        if not value:
            raise ValueError('an empty list; write "none"')
        if not isinstance(value, str):
            _refuse_counting_twice(value)
        return value

    @model_validator(mode="after")
    def _counts_importance_once(self) -> Self:
        if self.loss == "dpo" and self.corrections:
            raise ValueError(
                f'loss "dpo" is one of pairs, and correction {self.corrections[0]!r} would weigh '
                'the tokens of one rollout apart from the other\'s; use correction = "none"'
            )
        weighing = [name for name in self.corrections if name not in REJECTIONS]
        if not weighing:
            return self
        if self.loss in OFF_POLICY_LOSSES:
            raise ValueError(
                f"loss {self.loss!r} is meant for rollouts of any policy, unweighed; use "
                f'correction = "none" instead of {weighing[0]!r}, or one of '
                f"{', '.join(REJECTIONS)}, which weigh nothing"
            )
        if self.loss in BEHAVIOR_LOSSES:
            raise ValueError(
                f"loss {self.loss!r} already weighs by the behaviour policy, so correction "
                f'{weighing[0]!r} would count it twice; use correction = "none", or one of '
                f"{', '.join(REJECTIONS)}, which weigh nothing"
            )
        if self.loss in RATIO_LOSSES and not self.uses_proximal:
            raise ValueError(
                f"loss {self.loss!r} already weighs by current/behaviour policy, so correction "
                f'{weighing[0]!r} would count it twice; use correction = "none", or loss = '
                '"reinforce", or recompute_proximal = true'
            )
        return self

    @model_validator(mode="after")
    def _detaches_once(self) -> Self:
        detached = self.loss_options.get("proximal") == "detach"
        if self.loss == "decoupled_ppo" and detached and self.steps_per_batch > 1:
            raise ValueError(
                'loss_options.proximal = "detach" takes the current policy for that at the start '
                f"of the batch, but {self.steps_per_batch} steps (minibatches · epochs) move it; "
                'use "recompute", or one step'
            )
        return self

    @model_validator(mode="after")
    def _averages_sequences(self) -> Self:
        by_token = self.loss_options.get("variant") == "token_sq"
        if by_token or self.loss not in SEQUENCE_LOSSES:
            return self
        if self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss {self.loss!r} is one of whole sequences, so aggregation = "
                f"{self.aggregation!r} would weigh long ones more; use aggregation = "
                '"sequence_mean"'
            )
        return self

    @model_validator(mode="after")
    def _critic_and_gae_go_together(self) -> Self:
        of_the_users = ":" in self.advantage  # which says what it needs where it is loaded
        if not of_the_users and (self.advantage == "gae") != (self.critic is not None):
            if self.critic is None:
                raise ValueError('advantage = "gae" needs a [learner.critic] section')
            raise ValueError(
                f'[learner.critic] needs advantage = "gae", not {self.advantage!r}: only GAE uses '
                "values"
            )
        return self

    @model_validator(mode="after")
    def _the_reward_can_hold_the_kl(self) -> Self:
        if self.advantage in RAW_REWARD_ADVANTAGES and self.kl and self.kl.placement == "reward":
            raise ValueError(
                f'kl.placement = "reward" with advantage = {self.advantage!r}, which takes rewards '
                'as the task gives them; use placement = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _parts_hold_no_turns(self) -> Self:
        if self.advantage == "gdpo" and self.process_rewards:
            raise ValueError(
                'process_rewards = true with advantage = "gdpo", which normalises the parts of the '
                "reward, and what a turn earned is no part; use process_rewards = false"
            )
        return self

    @model_validator(mode="after")
    def _pairs_are_chosen(self) -> Self:
        if self.loss == "dpo" and self.advantage != "best_worst" and ":" not in self.advantage:
            raise ValueError(
                'loss "dpo" trains pairs; use advantage = "best_worst", which chooses them, not '
                f"{self.advantage!r}"
            )
        return self

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections without "none"."""
        names = (self.correction,) if isinstance(self.correction, str) else self.correction
        return tuple(name for name in names if name != "none")

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that a batch takes."""
        return self.minibatches * self.epochs

    @property
    def uses_proximal(self) -> bool:
        """Whether the proximal policy is computed at the start of each batch."""
        if self.loss == "decoupled_ppo":
            return bool(self.loss_options.get("proximal", "recompute") == "recompute")
        if self.recompute_proximal is None:
            return self.steps_per_batch > 1 and self._may_own_a_ratio
        return self.recompute_proximal

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is loaded."""
        return self.kl is not None or self.loss == "dpo"

    @property
    def corrects_off_policyness(self) -> bool:
        """Whether the objective may account for rollouts sampled by another policy.

        A loss of the user's is believed to own a ratio;
        `objective_check.corrects_off_policyness` loads it and knows.
        """
        return (
            any(name != "lag_mask" for name in self.corrections)
            or self.loss in (*BEHAVIOR_LOSSES, *OFF_POLICY_LOSSES)
            or (self._may_own_a_ratio and not self.uses_proximal)
        )

    @property
    def needs_behavior_logprobs(self) -> bool:
        """Whether the objective may compare with the probabilities that tokens were sampled with.

        A loss of the user's is believed to own a ratio like PPO's;
        `objective_check.needs_behavior_logprobs` loads it and knows.
        """
        ratio = self._may_own_a_ratio and not self.uses_proximal
        return self.compares_beside_the_loss or self.loss in (*BEHAVIOR_LOSSES, "kimi") or ratio

    @property
    def compares_beside_the_loss(self) -> bool:
        """Whether a correction or the KL term compares with the behaviour policy."""
        kl = self.kl is not None and (self.kl.placement == "reward" or "_" in self.kl.form)
        return bool(self.corrections) or kl

    @property
    def _may_own_a_ratio(self) -> bool:
        return self.loss in RATIO_LOSSES or ":" in self.loss


def _refuse_counting_twice(corrections: tuple[str, ...]) -> None:
    repeated = sorted({name for name in corrections if corrections.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} more than once; name each correction once")
    weighing = [name for name in corrections if name in WEIGHTS]
    if len(weighing) > 1:
        raise ValueError(
            f"{' and '.join(weighing)} each weigh by proximal / behaviour policy, so together they "
            f"would count it twice; use one of {', '.join(WEIGHTS)}, with any of "
            f"{', '.join(REJECTIONS)}"
        )


def _known(value: str, known: tuple[str, ...]) -> str:
    if value not in known and not all(value.partition(":")):
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f'{value!r} is not one of {", ".join(known)}, nor a dotted path "module:function"{hint}'
        )
    return value
