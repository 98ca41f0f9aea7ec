"""The objective that is minimised: policy loss, corrections, KL, entropy, values.

    batch ─▶ advantages ─▶ microbatch ─▶ loss = Σ weights · (keep · w · policy loss + penalties)
      └ state: running baselines and adapted coefficients, carried from batch to batch

Pure but for that state. No model is involved (`learner.update`); the rules of what goes together
are `learner.config.objective_rules`.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from learner.advantages import estimate_advantages
from learner.advantages.grouped import GroupedRewards, RolloutTokens
from learner.batch.batch import Microbatch, Sequences, TrainBatch
from learner.config.objective import KlConfig, ObjectiveConfig
from learner.config.traits import CORRECTIONS, ESTIMATORS, LOSSES
from learner.corrections import importance_weights
from learner.diagnostics.update_sums import ComparedTokens, PolicySums
from learner.engine.protocol import Forward
from learner.losses import LossInputs, TokenLoss, policy_loss
from learner.losses.distillation import TeacherSums, distillation
from learner.losses.kl import adapted_coefficient, kl_loss, kl_penalty
from learner.losses.regularisers import (
    adapted_entropy_coefficient,
    entropy_bonus,
    positive_nll,
    positive_tokens,
)
from learner.losses.value_loss import CriticSums, value_loss
from learner.objective.checks import check_objective
from queues.records import GOLD


class MicrobatchLoss(NamedTuple):
    """The loss of a microbatch, and what is reported about it."""

    loss: Tensor
    """Scalar with gradient, whose sum over the microbatches of a minibatch is minimised."""
    sums: PolicySums
    critic: CriticSums | None
    """Sums of a critic on the policy's own backbone; None without one."""
    compared: ComparedTokens


class Objective:
    """The objective of a recipe, with the state it carries from batch to batch."""

    def __init__(self, config: ObjectiveConfig) -> None:
        """Check the objective, and raise InputError if a setting is wrong."""
        check_objective(config)
        self._config = config
        self.state: dict[str, float] = {}
        """Part of a checkpoint."""

    @property
    def unit(self) -> str:
        """The unit that must lie whole in one microbatch: `token`, `sequence` or `group`."""
        config = self._config
        units: set[str] = {LOSSES[config.loss].traits.under(config.loss_options).unit}
        units |= {CORRECTIONS[name].traits.unit for name in config.corrections}
        return next(unit for unit in ("group", "sequence", "token") if unit in units)

    @property
    def kl_coefficient(self) -> float:
        """The present β; 0 without a KL penalty."""
        kl = self._config.kl
        return self.state.get("kl_coefficient", kl.coefficient) if kl else 0.0

    @property
    def entropy_coefficient(self) -> float:
        """Present weight of the bonus; 0 while the last batch's entropy is above the target."""
        entropy = self._config.entropy
        if entropy is None:
            return 0.0
        if entropy.target is None:
            return entropy.coefficient
        above = self.state.get("entropy", entropy.target) > entropy.target
        return 0.0 if above else self.state.get("entropy_coefficient", entropy.coefficient)

    def adapt(self, *, kl: float | None, entropy: float | None, rollouts: int) -> None:
        """Adapt the coefficients after a batch of `rollouts`.

        `kl` from the reference and `entropy` are means per token, in nats.
        """
        penalty, bonus = self._config.kl, self._config.entropy
        if penalty is not None and penalty.target is not None and kl is not None:
            self.state["kl_coefficient"] = adapted_coefficient(
                self.kl_coefficient,
                kl,
                target=penalty.target,
                horizon=penalty.horizon,
                samples=rollouts,
            )
        if bonus is not None and bonus.target is not None and entropy is not None:
            present = self.state.get("entropy_coefficient", bonus.coefficient)
            self.state["entropy_coefficient"] = adapted_entropy_coefficient(
                present, entropy, target=bonus.target, step=bonus.step
            )
            self.state["entropy"] = entropy

    def count_positive_tokens(self, minibatch: Sequences) -> int:
        """Count the tokens of a minibatch over which the likelihood of positives is a mean."""
        tokens, threshold = minibatch.tokens, self._config.positive_reward
        return int(positive_tokens(tokens.rewards, tokens.mask, threshold=threshold).sum())

    @property
    def credits_tokens(self) -> bool:
        """True if advantages depend on model scores of every sampled token."""
        config = self._config
        in_reward = config.kl is not None and config.kl.placement == "reward"
        return in_reward or config.critic is not None

    def with_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with its advantages, after models have scored it."""
        config = self._config
        raw = ESTIMATORS[config.advantage].traits.takes_task_rewards
        turns = None if raw else self._token_rewards(batch)
        tokens = RolloutTokens(
            mask=batch.sampled,
            sequence_ids=batch.tokens.sequence_ids,
            rewards=torch.zeros(len(batch.sampled)) if turns is None else turns,
            values=batch.tokens.values,
            step_ends=batch.step_ends,
            path_ids=batch.path_of_token,
        )
        rollouts = GroupedRewards(
            rewards=batch.task_rewards if raw else batch.rewards,
            groups=batch.group_ids,
            lengths=batch.response_lengths,
            state=self.state,
            baseline_rewards=batch.baseline_rewards,
            reward_parts={name: part for name, part in batch.reward_parts.items() if name != GOLD},
            tokens=tokens,
            truncated=batch.truncated,
            end_values=batch.end_values,
            trainable=tokens.sums(batch.tokens.mask, len(batch.rewards)) > 0,
        )
        advantages = estimate_advantages(config.advantage, rollouts, **config.advantage_options)
        dropped = ~advantages.keep
        if config.drop_tied:
            dropped = dropped | batch.tied
        return batch.with_advantages(advantages, dropped)

    def _token_rewards(self, batch: TrainBatch) -> Tensor | None:
        """Return rewards of tokens on top of the final reward, [N]; None if there are none."""
        kl, tokens, turns = self._config.kl, batch.tokens, batch.process_rewards
        if kl is None or kl.placement != "reward":
            return turns
        proximal, reference = tokens.proximal_logprobs, tokens.reference_logprobs
        assert reference is not None
        policy = tokens.behavior_logprobs if proximal is None else proximal
        # Unlike a term of the loss this counts the effect of a token on the KL of later tokens.
        estimate = kl_penalty("k1", policy, reference, mask=batch.sampled).detach()
        penalty = -self.kl_coefficient * estimate
        return penalty if turns is None else penalty + turns

    def loss(
        self, micro: Microbatch, out: Forward, *, version: int, positive_tokens: int
    ) -> MicrobatchLoss:
        """Compute the loss of a microbatch, and what is reported about it.

        `out` is the policy's output for it, `version` the one being trained, and `positive_tokens`
        the count by `count_positive_tokens` of the whole minibatch.
        """
        config = self._config
        inputs = _loss_inputs(micro, out, version)
        policy = policy_loss(config.loss, inputs, **config.loss_options)
        correction = importance_weights(
            config.corrections or "none", inputs, **config.correction_options
        )
        weights = micro.token_weights * torch.where(correction.keep, correction.weights, 0.0)
        loss = own_loss = config.policy_weight * (weights * policy.per_token).sum()
        counts, kl_sum, critic = {**policy.stats, **correction.stats}, None, None
        pull, teachers = self._distillation(micro, inputs, out, counts)
        loss = loss + pull
        if micro.reference_logprobs is not None:
            penalty, kl = self._kl_penalty(micro, inputs, out)
            loss, kl_sum = loss + penalty, kl.stats["kl"]
            counts.setdefault("reference_not_finite", kl.stats["reference_not_finite"])
        if config.entropy is not None:
            bonus = entropy_bonus(inputs)
            loss = loss + self.entropy_coefficient * (micro.token_weights * bonus.per_token).sum()
        if config.positive_nll:
            nll = positive_nll(inputs, total=positive_tokens, threshold=config.positive_reward)
            loss, counts = loss + config.positive_nll * nll.per_token.sum(), {**nll.stats, **counts}
        if config.critic is not None and out.values is not None:
            of_values, critic = self.value_loss(micro, out.values)
            loss = loss + config.critic.coefficient * of_values
        trained, rejected = inputs.trained, inputs.trained & ~correction.keep
        sums = PolicySums(
            loss=loss.detach(),
            policy_loss=own_loss.detach(),
            entropy=out.entropies.detach()[trained].sum(),
            trained=trained.sum(),
            masked_in=micro.mask.sum(),
            rejected=rejected.sum(),
            learned=(trained if self._penalises else trained & ~rejected).sum(),
            reference_kl=kl_sum,
            teachers=teachers,
            counts=counts,
        )
        assert micro.origins is not None
        assert micro.units is not None
        compared = ComparedTokens(
            inputs.behavior_log_ratio, trained, micro.origins, micro.sequence_ids,
            micro.units, micro.behavior_logprobs,
        )  # fmt: skip
        return MicrobatchLoss(loss, sums, critic, compared)

    @property
    def _penalises(self) -> bool:
        """True if tokens that a correction rejects still have a part in the loss."""
        config = self._config
        kl = config.kl is not None and config.kl.placement == "loss"
        shared = config.critic is not None and config.critic.shared
        others = kl or shared or config.distillation is not None or bool(config.positive_nll)
        return others or self.entropy_coefficient > 0

    def _distillation(
        self, micro: Microbatch, inputs: LossInputs, out: Forward, counts: dict[str, Tensor]
    ) -> tuple[Tensor, TeacherSums | None]:
        """Return the divergence from the teachers, weighed for the loss; add to the counts."""
        config, logprobs = self._config.distillation, micro.teacher_logprobs
        if config is None or logprobs is None:
            return out.logprobs.new_zeros(()), None
        shares = micro.teacher_shares
        assert shares is not None
        own = None if out.others is None else out.others.view_as(logprobs)
        term = distillation(config, inputs, logprobs, shares, own)
        counts["teacher_not_finite"] = term.not_finite
        return config.coefficient * (micro.token_weights * term.per_token).sum(), term.sums

    def _kl_penalty(
        self, micro: Microbatch, inputs: LossInputs, out: Forward
    ) -> tuple[Tensor, TokenLoss]:
        """Return the distance to the reference, weighed for the loss (0 if it is not in it)."""
        kl = self._config.kl or KlConfig()
        if self._config.kl is not None and kl.placement == "loss":
            term = kl_loss(kl.form, inputs, cap=kl.cap)
            return self.kl_coefficient * (micro.token_weights * term.per_token).sum(), term
        measured = replace(inputs, logprobs=out.logprobs.detach())
        return out.logprobs.new_zeros(()), kl_loss(kl.form, measured, cap=kl.cap)

    def value_loss(self, micro: Microbatch, values: Tensor) -> tuple[Tensor, CriticSums]:
        """Compute the critic's loss, averaged like the policy loss, and sums over its tokens."""
        assert self._config.critic is not None
        assert micro.values is not None
        assert micro.returns is not None
        per_token = value_loss(values, micro.values, micro.returns, clip=self._config.critic.clip)
        loss = (micro.token_weights * torch.where(micro.mask, per_token, 0.0)).sum()
        return loss, CriticSums.of(loss, micro.values, micro.returns, micro.mask)


def _loss_inputs(micro: Microbatch, out: Forward, version: int) -> LossInputs:
    return LossInputs(
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
