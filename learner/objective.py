"""What is minimised, of one packed row: policy loss, corrections, KL, entropy, values.

    batch ─▶ advantages ─▶ row ─▶ loss = Σ weights · (keep · w · policy loss + penalties)
      └ state: running baselines and adapted coefficients, carried from batch to batch

Pure but for that state. No model is involved; which models are asked for what is `update`'s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from learner.advantages import ESTIMATORS, Advantages, compute_advantages
from learner.aggregation import token_weights
from learner.batch import MicroBatch, Sequences, TrainBatch
from learner.corrections import CORRECTIONS, importance_weights
from learner.engine import Forward
from learner.errors import InputError
from learner.kl import AdaptiveCoefficient, kl_loss, kl_rewards
from learner.losses import LOSSES, LossInputs, PolicyLoss, TokenLoss, policy_loss
from learner.objective_config import RAW_REWARD_ADVANTAGES, EntropyConfig, ObjectiveConfig
from learner.offpolicyness import measure, origins
from learner.regularisers import (
    AdaptiveEntropy,
    entropy_bonus,
    positive_nll,
    positive_tokens,
)
from learner.values import value_loss, variance_sums


class Objective:
    """The objective of a recipe, with what it carries from batch to batch."""

    def __init__(self, config: ObjectiveConfig) -> None:
        """Tries itself out, so that a wrong setting is found before anything is generated.

        Raises:
            InputError: See `check_objective`.
        """
        check_objective(config)
        self._config = config
        self.state: dict[str, float] = {}
        """Part of a checkpoint."""

    @property
    def unit(self) -> str:
        """What must lie whole in one row: `token` (nothing), `sequence` or `group`."""
        return LOSSES[self._config.loss].under(self._config.loss_options).unit

    @property
    def kl_coefficient(self) -> float:
        """β as it is now; 0 without a KL penalty."""
        kl = self._config.kl
        return self.state.get(AdaptiveCoefficient.KEY, kl.coefficient) if kl else 0.0

    @property
    def entropy_coefficient(self) -> float:
        """What multiplies the entropy bonus now: the entropy that counts is the last batch's."""
        entropy = self._config.entropy
        if entropy is None:
            return 0.0
        if entropy.target is None:
            return entropy.coefficient
        last = self.state.get("entropy", entropy.target)
        return _entropy_controller(entropy, entropy.target).coefficient(self.state, entropy=last)

    def adapt(self, *, kl: float | None, entropy: float | None, rollouts: int) -> None:
        """Adapts the coefficients after a batch.

        Args:
            kl: Mean KL from the reference per token, in nats.
            entropy: Mean entropy of a token, in nats.
            rollouts: Of the batch.
        """
        config = self._config
        if config.kl is not None and config.kl.target is not None and kl is not None:
            controller = AdaptiveCoefficient(
                config.kl.coefficient, config.kl.target, config.kl.horizon
            )
            self.state.update(controller.updated(self.state, kl=kl, samples=rollouts))
        if config.entropy is not None and config.entropy.target and entropy is not None:
            held = _entropy_controller(config.entropy, config.entropy.target)
            self.state.update(held.updated(self.state, entropy=entropy))
            self.state["entropy"] = entropy

    def positive(self, minibatch: Sequences) -> int:
        """Tokens of a minibatch that the likelihood of positive examples is a mean over."""
        tokens, threshold = minibatch.tokens, self._config.positive_reward
        return int(positive_tokens(tokens.rewards, tokens.mask, threshold=threshold).sum())

    @property
    def credits_tokens(self) -> bool:
        """Whether advantages are made of what models say of every token that was sampled."""
        config = self._config
        in_reward = config.kl is not None and config.kl.placement == "reward"
        return in_reward or config.critic is not None

    def weighed(self, batch: TrainBatch) -> TrainBatch:
        """The batch with its advantages, after models have scored it."""
        config = self._config
        raw = config.advantage in RAW_REWARD_ADVANTAGES
        advantages = compute_advantages(
            config.advantage,
            batch.task_rewards if raw else batch.rewards,
            batch.group_ids,
            lengths=batch.sampled_lengths,
            state=self.state,
            baseline_rewards=batch.baseline_rewards,
            reward_parts=batch.reward_parts,
            mask=batch.sampled,
            sequence_ids=batch.tokens.sequence_ids,
            token_rewards=None if raw else self._token_rewards(batch),
            values=batch.tokens.values,
            truncated=batch.truncated,
            **config.advantage_options,
        )
        return batch.with_advantages(advantages, dropped=self._dropped(batch, advantages))

    def _token_rewards(self, batch: TrainBatch) -> Tensor | None:
        """[N] what tokens are given on top of the final reward; None: nothing."""
        kl, tokens, given = self._config.kl, batch.tokens, batch.process_rewards
        if kl is None or kl.placement != "reward":
            return given
        assert tokens.reference_logprobs is not None
        penalty = kl_rewards(
            tokens.behavior_logprobs,
            tokens.reference_logprobs,
            batch.sampled,
            coefficient=self.kl_coefficient,
        )
        return penalty if given is None else penalty + given

    def _dropped(self, batch: TrainBatch, advantages: Advantages) -> Tensor:
        """[R] bool, rollouts that no minibatch holds."""
        unused = ~advantages.keep
        return unused | batch.tied if self._config.drop_tied else unused

    def loss(
        self, micro: MicroBatch, out: Forward, *, version: int, positive_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a row, and sums over its tokens.

        Args:
            micro: The row, on the device of `out`.
            out: What the policy says of it.
            version: Being trained.
            positive_tokens: Of the whole minibatch; see `positive`.

        Returns:
            A scalar with gradient, whose sum over the rows of a minibatch is what a step minimises;
            and scalars that add up over rows and ranks.
        """
        config = self._config
        inputs = LossInputs(
            logprobs=out.logprobs,
            behavior_logprobs=micro.behavior_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            sequence_ids=micro.sequence_ids,
            proximal_logprobs=micro.proximal_logprobs,
            reference_logprobs=micro.reference_logprobs,
            versions=micro.versions,
            group_ids=micro.group_ids,
            version=version,
            rewards=micro.rewards,
            entropies=out.entropies,
        )
        policy = policy_loss(config.loss, inputs, **config.loss_options)
        correction = importance_weights(
            config.corrections or "none", inputs, **config.correction_options
        )
        weights = micro.token_weights * torch.where(correction.keep, correction.weights, 0.0)
        loss = (weights * policy.per_token).sum()
        fractions = {**policy.stats, **correction.stats}
        sums = {
            "policy_loss": loss.detach(),
            "entropy": out.entropies.detach()[inputs.trained].sum(),
            "trained": inputs.trained.sum(),
            "masked_in": micro.mask.sum(),
            "rejected": (inputs.trained & ~correction.keep).sum(),
        }
        for penalty, own in self._penalties(micro, inputs, out, positive_tokens):
            loss = loss + penalty
            sums |= own
        origin = origins(micro.versions, micro.mask, micro.sequence_ids, version=version)
        sums |= {
            "loss": loss.detach(),
            **measure(inputs.behavior_log_ratio, inputs.trained, origin, micro.sequence_ids),
            **{f"fraction/{name}": value for name, value in fractions.items()},
        }
        return loss, sums

    def _penalties(
        self, micro: MicroBatch, inputs: LossInputs, out: Forward, positive: int
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """What is added to the policy loss, with sums over tokens."""
        config, weights = self._config, micro.token_weights
        if micro.reference_logprobs is not None:
            form, cap = (config.kl.form, config.kl.cap) if config.kl else ("weighted_k2", 5.0)
            in_loss = config.kl is not None and config.kl.placement == "loss"
            if in_loss:
                kl = kl_loss(form, inputs, cap=cap)
                penalty = self.kl_coefficient * (weights * kl.per_token).sum()
            else:
                kl = kl_loss(form, replace(inputs, logprobs=out.logprobs.detach()), cap=cap)
                penalty = torch.zeros_like(weights[0])
            missing = kl.stats["reference_not_finite"]
            yield (
                penalty,
                {
                    "reference_kl": kl.stats["kl"],
                    "fraction/reference_not_finite": missing,
                },
            )
        if config.entropy is not None:
            bonus = entropy_bonus(inputs)
            yield self.entropy_coefficient * (weights * bonus.per_token).sum(), {}
        if config.positive_nll:
            nll = positive_nll(inputs, total=positive, threshold=config.positive_reward)
            sums = {f"fraction/{name}": count for name, count in nll.stats.items()}
            yield config.positive_nll * nll.per_token.sum(), sums
        if config.critic is not None and out.values is not None:
            loss, sums = self.value_loss(micro, out.values)
            yield config.critic.coefficient * loss, sums

    def value_loss(self, micro: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The critic's loss of a row, averaged like the policy loss, and sums over its tokens."""
        assert self._config.critic is not None
        assert micro.values is not None
        assert micro.returns is not None
        per_token = value_loss(values, micro.values, micro.returns, clip=self._config.critic.clip)
        loss = (micro.token_weights * torch.where(micro.mask, per_token, 0.0)).sum()
        sums = variance_sums(micro.values, micro.returns, micro.mask)
        return loss, {"value_loss": loss.detach(), **sums}


def _entropy_controller(config: EntropyConfig, target: float) -> AdaptiveEntropy:
    return AdaptiveEntropy(target=target, step=config.step, initial=config.coefficient)


def check_objective(config: ObjectiveConfig) -> None:
    """Computes the objective of made-up rollouts of one group.

    Raises:
        InputError: An unknown name or option, a value that does not fit, a ratio that would count
            twice, or something needed that nothing computes.
    """
    loss = LOSSES[config.loss].under(config.loss_options)
    _check_corrections(config, loss)
    if loss.aggregations is not None and config.aggregation not in loss.aggregations:
        raise InputError(
            f"loss {config.loss!r} is what it claims only under aggregation "
            f"{' or '.join(loss.aggregations)}, not {config.aggregation!r}"
        )
    _check_needs(config)
    row = _made_up(config)
    try:
        advantages = compute_advantages(
            config.advantage,
            torch.tensor([0.0, 1.0]),
            torch.tensor([0, 0]),
            lengths=torch.tensor([1, 1]),
            baseline_rewards=torch.tensor([0.5, 0.5]),
            reward_parts=_made_up_parts(config.advantage_options.get("weights")),
            mask=row.mask,
            sequence_ids=row.sequence_ids,
            values=None if config.critic is None else torch.zeros(2),
            truncated=torch.tensor([False, False]),
            **config.advantage_options,
        )
        result = policy_loss(config.loss, row, **config.loss_options)
        names = config.corrections or "none"
        importance_weights(names, row, **config.correction_options)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"the objective cannot be computed: {error}") from error
    _check_numbers(f"advantage {config.advantage!r}", advantages.values)
    if not isinstance(result, TokenLoss):
        raise InputError(f"loss {config.loss!r} returned {result!r}, must be a TokenLoss")
    _check_numbers(f"loss {config.loss!r}", result.per_token)
    if config.critic is not None and advantages.returns is None:
        raise InputError(
            f"a critic learns returns, and advantage {config.advantage!r} gives none; let it "
            "return Estimate(..., returns=...), or leave [learner.critic] out"
        )
    ids = row.sequence_ids
    token_weights(config.aggregation, row.mask, ids, ids, max_length=config.fixed_length)


def _check_numbers(who: str, values: Tensor) -> None:
    """What was made of two made-up tokens must be two finite numbers."""
    if values.shape != (2,) or not torch.isfinite(values).all():
        raise InputError(
            f"{who} made {values.tolist()} of two made-up rollouts of one token, must be two "
            "finite numbers"
        )


def _made_up_parts(weights: Any) -> dict[str, Tensor]:
    """Rewards of two rollouts, of the parts that an estimator weighs."""
    names = weights if isinstance(weights, Mapping) and weights else ("made_up",)
    return {name: torch.tensor([0.0, 1.0]) for name in names}


def _made_up(config: ObjectiveConfig) -> LossInputs:
    """Two rollouts of one token, of one group, with what is computed under the configuration."""
    logprobs = torch.tensor([-1.0, -2.0])
    return LossInputs(
        logprobs=logprobs,
        behavior_logprobs=logprobs,
        advantages=torch.tensor([-1.0, 1.0]),
        mask=torch.tensor([True, True]),
        sequence_ids=torch.tensor([0, 1]),
        proximal_logprobs=logprobs if config.uses_proximal else None,
        reference_logprobs=logprobs if config.uses_reference else None,
        versions=torch.tensor([0, 0]),
        group_ids=torch.tensor([0, 0]),
        version=0,
        rewards=torch.tensor([0.0, 1.0]),
        entropies=torch.tensor([1.0, 1.0]),
    )


def needs(config: ObjectiveConfig) -> frozenset[str]:
    """What advantage, loss and corrections say that they cannot do without.

    Fields of `LossInputs` and arguments of `compute_advantages`; and `group_size`, where rollouts
    of one prompt are compared. Of these `baseline_rewards`, `reward_parts` and `group_size` are for
    others than the learner to supply.

    Raises:
        InputError: One of them does not exist.
    """
    loss, estimator = LOSSES[config.loss].under(config.loss_options), ESTIMATORS[config.advantage]
    corrections = [CORRECTIONS[name].needs for name in config.corrections]
    said = loss.needs.union(estimator.needs, *corrections)
    return said | {"group_size"} if estimator.relative or loss.unit == "group" else said


def _check_needs(config: ObjectiveConfig) -> None:
    remedies = {
        "reference_logprobs": (config.uses_reference, "give a [learner.kl] section"),
        "proximal_logprobs": (config.uses_proximal, "set learner.recompute_proximal = true"),
        "values": (config.critic is not None, "give a [learner.critic] section"),
    }
    for name in sorted(needs(config) & remedies.keys()):
        supplied, remedy = remedies[name]
        if not supplied:
            raise InputError(
                f"advantage {config.advantage!r}, loss {config.loss!r} or correction "
                f"{config.correction!r} needs {name}, which nothing computes; {remedy}"
            )


def _check_corrections(config: ObjectiveConfig, loss: PolicyLoss) -> None:
    weighing = [name for name in config.corrections if CORRECTIONS[name].weighs]
    if len(weighing) > 1:
        raise InputError(
            f"corrections {', '.join(weighing)} each weigh by proximal / behaviour policy, so "
            "together they would count it twice; use one of them, with any that only reject"
        )
    if (config.corrections and loss.unit == "group") or (weighing and loss.off_policy):
        raise InputError(
            f"loss {config.loss!r} is meant for rollouts of any policy, or is one of whole groups; "
            f"correction {config.corrections[0]!r} does not go with it: use correction 'none'"
        )
    if not weighing or not loss.owns_is:
        return
    if loss.anchor == "behavior" or not config.uses_proximal:
        remedy = "" if loss.anchor == "behavior" else ", or recompute_proximal = true"
        raise InputError(
            f"loss {config.loss!r} already weighs tokens by current/behaviour; correction "
            f"{weighing[0]!r} would count that twice: use correction 'none'{remedy}"
        )


def corrects_off_policyness(config: ObjectiveConfig) -> bool:
    """Whether the objective accounts for rollouts sampled by another policy.

    As `ObjectiveConfig.corrects_off_policyness`, but a loss of the user's is loaded and asked.

    Raises:
        InputError: There is no such loss.
    """
    loss = LOSSES[config.loss].under(config.loss_options)
    to_behavior = loss.anchor == "behavior" or not config.uses_proximal
    corrected = any(name != "lag_mask" for name in config.corrections)
    return corrected or loss.off_policy or (loss.owns_is and to_behavior)


def needs_behavior_logprobs(config: ObjectiveConfig) -> bool:
    """Whether the objective compares with the probabilities that tokens were sampled with.

    As `ObjectiveConfig.needs_behavior_logprobs`, but a loss of the user's is loaded and asked.

    Raises:
        InputError: There is no such loss.
    """
    loss = LOSSES[config.loss].under(config.loss_options)
    to_behavior = loss.anchor == "behavior" or (loss.owns_is and not config.uses_proximal)
    return to_behavior or config.compares_beside_the_loss
