"""Settings of what is optimised: advantage, policy loss, corrections, KL, entropy, critic."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.recipe_section import ResumeRule, Section
from headway.registry import Entry, Registry
from learner.config.distillation import DistillationConfig
from learner.config.lora import ADAPTED, LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.option_types import ModelName
from learner.config.traits import CORRECTIONS, ESTIMATORS, LOSSES, ObjectiveTraits

_KINDS: Mapping[str, Registry[Any]] = {
    "advantage": ESTIMATORS,
    "loss": LOSSES,
    "correction": CORRECTIONS,
}

OPTIMISED = ResumeRule(
    "it is the objective that its checkpoints, recorded batches and figures belong to"
)


class KlConfig(Section):
    """Distance to a reference policy, as a penalty. Without it no reference is loaded."""

    coefficient: float = Field(default=0.05, gt=0)
    """β; its initial value where `target` adapts it."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the policy loss. `reward`: β · k1 of each token, taken off its reward
    before advantages are computed, so that credit reaches the tokens before it; by the proximal
    policy where it is computed, else by the probabilities that tokens were sampled with."""
    form: Literal["weighted_k2", "ratio_k1", "ratio_k3", "k1", "k2", "k3"] = "weighted_k2"
    """Form of the term in the loss. The first three pull towards the reference for stale rollouts
    too, by the ratio current / behaviour policy; k2 and k3 only for rollouts of the current policy,
    and k1 not even there. In the reward it is k1 always."""
    cap: float = Field(default=5.0, gt=1)
    """Largest ratio of `weighted_k2`."""
    target: float | None = Field(default=None, gt=0)
    """Mean KL per token that β is adapted to (Ziegler et al. 2019, §2.2); None keeps β."""
    horizon: int = Field(default=10_000, ge=1)
    """Rollouts over which the controller corrects an error of 100 %."""
    reference: ModelName | None = None
    """Model folder or hub name of the reference; None takes the run's initial model, which with
    [learner.lora] is the policy without its adapter and takes no memory."""
    refresh_every: int | None = Field(default=None, ge=1)
    """Batches after which the reference becomes the current policy; None never."""
    refresh_mix: float = Field(default=1.0, gt=0, le=1)
    """Share of the current policy in the refreshed reference; below 1 a soft update."""


class EntropyConfig(Section):
    """An entropy bonus: −coefficient · entropy in the loss, averaged like the policy loss."""

    coefficient: float = Field(default=0.0, ge=0)
    """The initial value where `target` adapts it."""
    target: float | None = Field(default=None, gt=0)
    """Mean entropy in nats below which the coefficient rises and the bonus applies, and above which
    it falls (Skywork-OR1); None keeps it."""
    step: float = Field(default=0.005, gt=0)
    """Change of the coefficient at each batch."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.coefficient == 0 and self.target is None:
            raise ValueError("give a coefficient above 0, or a target, or leave the section out")
        return self


class CriticConfig(OptimizerConfig):
    """A value model, which the advantage `gae` needs; with an optimizer of its own.

    Settings of its optimizer that are not given are those of [learner].
    """

    on_resume = OPTIMISED

    path: ModelName | None = None
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
    lora: Annotated[LoraConfig | None, ADAPTED] = None
    """An adapter for a critic of its own, trained beside its head in place of the weights."""

    @model_validator(mode="after")
    def _shared_has_nothing_of_its_own(self) -> Self:
        if self.shared and (self.path is not None or self.pretrain_batches):
            raise ValueError(
                f"critic.shared = true with path = {self.path!r} and pretrain_batches = "
                f"{self.pretrain_batches}: a head on the policy's backbone has no backbone of its "
                "own to load, and cannot be trained without it; leave both out, or shared = false"
            )
        if self.shared and self.lora is not None:
            raise ValueError(
                "critic.shared = true with a section [critic.lora]: the policy's backbone has the "
                "adapter of [learner.lora]; leave one out"
            )
        return self


class ObjectiveConfig(Section):
    """The objective that the learner optimises; `objective_rules` says what goes together."""

    on_resume = OPTIMISED

    advantage: str = "grpo"
    """One of the estimators of `learner/docs/objectives.md`, or "module:function"."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the advantage."""
    loss: str = "cispo"
    """One of the policy losses of `learner/docs/objectives.md`, or "module:function"."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss."""
    correction: str | tuple[str, ...] = "none"
    """An importance weight on top of the loss, or a rejection; or a list of rejections with at most
    one weight."""
    correction_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the correction."""
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_length"] = (
        "token_mean"
    )
    """Weights of tokens: equal for all, for all rollouts, for all prompts, or a constant."""
    fixed_length: int | None = Field(default=None, ge=1)
    """Tokens that `fixed_length` divides every rollout by; None takes actors.max_new_tokens."""
    mask_truncated: bool = False
    """Leave rollouts that were cut off, at their limit of tokens or turns, out of the loss; their
    rewards stay in the baselines, and the rollouts in the count of `fixed_length`. best_of_n and
    best_worst choose among the others."""
    max_token_lag: int | None = Field(default=None, ge=0)
    """Leave tokens that lag by more versions than this out of the loss; None takes
    queues.max_staleness where queues.on_overdue = "mask", else there is no limit."""
    drop_tied: bool = False
    """Leave groups whose rewards are all equal out of the loss and of every denominator (ScaleRL),
    so that a batch gets smaller; `queues.filter_tied` replaces them instead. Both are only for
    advantages that compare the rollouts of a group alone."""
    process_rewards: bool = False
    """Credit each turn, or step that a process reward model scores, with its own reward, also if
    that is 0, for estimators that tell tokens apart."""
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    critic: CriticConfig | None = None
    distillation: DistillationConfig | None = None
    positive_nll: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the tokens of rollouts whose task gave a reward
    above `positive_reward` (VAPO); shaping does not count."""
    positive_reward: float = 0.0
    """Rollouts with a larger reward count as positive for positive_nll."""
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

    @field_validator("advantage", "loss", "correction")
    @classmethod
    def _known_and_named_once(
        cls, value: str | tuple[str, ...], info: Any
    ) -> str | tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        for name in names:
            _KINDS[info.field_name].check(name)
        if not names:
            raise ValueError('an empty list; write "none"')
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} more than once; name each correction once")
        return value

    @property
    def traits(self) -> ObjectiveTraits:
        """Traits of the built-in functions that are named; None for the user's."""
        return self.traits_by(Registry.get)

    def traits_by(self, find: Callable[[Registry[Any], str], Entry[Any] | None]) -> ObjectiveTraits:
        """Return traits of the functions that are named, None for those that `find` does not."""
        advantage, loss = find(ESTIMATORS, self.advantage), find(LOSSES, self.loss)
        corrections = {name: find(CORRECTIONS, name) for name in self.corrections}
        return ObjectiveTraits(
            advantage=advantage.traits if advantage else None,
            loss=loss.traits.under(self.loss_options) if loss else None,
            corrections={k: entry.traits if entry else None for k, entry in corrections.items()},
        )

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
        """True if the proximal policy is computed at the start of each batch.

        By default where the loss may own a ratio to it, and a batch takes several steps. A loss of
        the user's is taken to own one.
        """
        loss = self.traits.loss
        if loss is not None and loss.recomputes_proximal is not None:
            return loss.recomputes_proximal
        if self.recompute_proximal is not None:
            return self.recompute_proximal
        owns_ratio = loss is None or (loss.owns_is and loss.anchor == "proximal")
        return self.steps_per_batch > 1 and owns_ratio

    @property
    def policy_weight(self) -> float:
        """Weight of the policy loss in the loss; 0 where distillation stands alone."""
        return 1.0 if self.distillation is None else self.distillation.policy_loss

    @property
    def bootstraps(self) -> bool:
        """True if advantages go on with a critic's value of the state after a rollout."""
        return bool(self.advantage_options.get("bootstrap_truncated"))

    @property
    def uses_reference(self) -> bool:
        """True if a reference policy is loaded."""
        loss = self.traits.loss
        return self.kl is not None or (loss is not None and "reference_logprobs" in loss.needs)
