"""The objective that is minimised: policy loss, corrections, KL, entropy, values.

    batch ─▶ advantages ─▶ microbatch ─▶ loss = Σ weights · (keep · w · policy loss + penalties)
      └ state: running baselines and adapted coefficients, carried from batch to batch

Pure but for that state. No model is involved (`learner.update`); the rules of what goes together
are `learner.config.objective_rules`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from learner.advantages import ESTIMATORS, Advantages, compute_advantages
from learner.batch.batch import Microbatch, Sequences, TrainBatch
from learner.config.objective import EntropyConfig, ObjectiveConfig
from learner.corrections import importance_weights
from learner.engine.protocol import Forward
from learner.losses import LOSSES, LossInputs, policy_loss
from learner.losses.kl import AdaptiveCoefficient, kl_loss, kl_rewards
from learner.losses.regularisers import (
    AdaptiveEntropy,
    entropy_bonus,
    positive_nll,
    positive_tokens,
)
from learner.losses.value_loss import value_loss, variance_sums
from learner.objective.checks import check_objective


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
        """What must lie whole in one microbatch: `token` (nothing), `sequence` or `group`."""
        return LOSSES[self._config.loss].traits.under(self._config.loss_options).unit

    @property
    def kl_coefficient(self) -> float:
        """The present β; 0 without a KL penalty."""
        kl = self._config.kl
        return self.state.get(AdaptiveCoefficient.KEY, kl.coefficient) if kl else 0.0

    @property
    def entropy_coefficient(self) -> float:
        """Present weight of the entropy bonus, by the entropy of the last batch."""
        entropy = self._config.entropy
        if entropy is None:
            return 0.0
        if entropy.target is None:
            return entropy.coefficient
        last = self.state.get("entropy", entropy.target)
        return _entropy_controller(entropy, entropy.target).coefficient(self.state, entropy=last)

    def adapt(self, *, kl: float | None, entropy: float | None, rollouts: int) -> None:
        """Adapt the coefficients after a batch of `rollouts`.

        `kl` from the reference and `entropy` are means per token, in nats.
        """
        config = self._config
        if config.kl is not None and config.kl.target is not None and kl is not None:
            controller = AdaptiveCoefficient(
                config.kl.coefficient, config.kl.target, config.kl.horizon
            )
            self.state.update(controller.updated(self.state, kl=kl, samples=rollouts))
        if config.entropy is not None and config.entropy.target and entropy is not None:
            bonus = _entropy_controller(config.entropy, config.entropy.target)
            self.state.update(bonus.updated(self.state, entropy=entropy))
            self.state["entropy"] = entropy

    def positive(self, minibatch: Sequences) -> int:
        """Count the tokens of a minibatch over which the likelihood of positives is a mean."""
        tokens, threshold = minibatch.tokens, self._config.positive_reward
        return int(positive_tokens(tokens.rewards, tokens.mask, threshold=threshold).sum())

    @property
    def credits_tokens(self) -> bool:
        """True if advantages depend on model scores of every sampled token."""
        config = self._config
        in_reward = config.kl is not None and config.kl.placement == "reward"
        return in_reward or config.critic is not None

    def weighed(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with its advantages, after models have scored it."""
        config = self._config
        raw = ESTIMATORS[config.advantage].traits.takes_task_rewards
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
        """Return rewards of tokens on top of the final reward, [N]; None if there are none."""
        kl, tokens, turns = self._config.kl, batch.tokens, batch.process_rewards
        if kl is None or kl.placement != "reward":
            return turns
        assert tokens.reference_logprobs is not None
        penalty = kl_rewards(
            tokens.behavior_logprobs,
            tokens.reference_logprobs,
            batch.sampled,
            coefficient=self.kl_coefficient,
        )
        return penalty if turns is None else penalty + turns

    def _dropped(self, batch: TrainBatch, advantages: Advantages) -> Tensor:
        """Return the rollouts that no minibatch holds, [R] bool."""
        unused = ~advantages.keep
        return unused | batch.tied if self._config.drop_tied else unused

    def loss(
        self, micro: Microbatch, out: Forward, *, version: int, positive_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """Compute the loss of a microbatch, sums over tokens, and what `off_policy.measure` needs.

        `out` is the policy's output for it, `version` the one being trained, and `positive_tokens`
        the count by `positive` of the whole minibatch.

        Returns:
            A scalar with gradient, whose sum over the microbatches of a minibatch is minimised;
            scalars that add up over microbatches and ranks; and the arguments of
            `off_policy.measure`, which may be concatenated.
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
        sums |= {
            "loss": loss.detach(),
            **{f"fraction/{name}": value for name, value in fractions.items()},
        }
        assert micro.origins is not None
        compared = inputs.behavior_log_ratio, inputs.trained, micro.origins, micro.sequence_ids
        return loss, sums, compared

    def _penalties(
        self, micro: Microbatch, inputs: LossInputs, out: Forward, positive: int
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the terms added to the policy loss, each with sums over tokens."""
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

    def value_loss(self, micro: Microbatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the critic's loss, averaged like the policy loss, and sums over its tokens."""
        assert self._config.critic is not None
        assert micro.values is not None
        assert micro.returns is not None
        per_token = value_loss(values, micro.values, micro.returns, clip=self._config.critic.clip)
        loss = (micro.token_weights * torch.where(micro.mask, per_token, 0.0)).sum()
        sums = variance_sums(micro.values, micro.returns, micro.mask)
        return loss, {"value_loss": loss.detach(), **sums}


def _entropy_controller(config: EntropyConfig, target: float) -> AdaptiveEntropy:
    return AdaptiveEntropy(target=target, step=config.step, initial=config.coefficient)
