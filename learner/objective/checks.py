"""A trial of an objective before a run: its functions are loaded, checked and called once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.errors import InputError
from headway.registry import Registry
from learner.advantages import estimate_advantages
from learner.advantages.grouped import GroupedRewards, RolloutTokens
from learner.batch.token_weights import token_weights
from learner.config.objective import ObjectiveConfig
from learner.config.objective_rules import check_traits
from learner.config.traits import ObjectiveTraits
from learner.corrections import importance_weights
from learner.losses import LossInputs, TokenLoss, policy_loss


def check_objective(config: ObjectiveConfig) -> ObjectiveTraits:
    """Compute the objective of two made-up rollouts of one group.

    Returns:
        The traits of its functions.

    Raises:
        InputError: An unknown name or option, a value that does not fit, a ratio that would count
            twice, something needed that nothing computes, or a result that is no number.
    """
    traits = config.traits_by(Registry.load)
    check_traits(config, traits)
    microbatch = _made_up(config)
    try:
        rollouts = _made_up_rollouts(config, microbatch)
        advantages = estimate_advantages(config.advantage, rollouts, **config.advantage_options)
        result = policy_loss(config.loss, microbatch, **config.loss_options)
        names = config.corrections or "none"
        importance_weights(names, microbatch, **config.correction_options)
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
    ids = microbatch.sequence_ids
    token_weights(config.aggregation, microbatch.mask, ids, ids, max_length=config.fixed_length)
    return traits


def _check_numbers(who: str, values: Tensor) -> None:
    """Raise InputError unless `values` are two finite numbers, one for each made-up token."""
    if values.shape != (2,) or not torch.isfinite(values).all():
        raise InputError(
            f"{who} made {values.tolist()} of two made-up rollouts of one token, must be two "
            "finite numbers"
        )


def _made_up_rollouts(config: ObjectiveConfig, tokens: LossInputs) -> GroupedRewards:
    """Return the rollouts of two made-up tokens, with reward parts that an estimator weighs."""
    weights = config.advantage_options.get("weights")
    names = weights if isinstance(weights, Mapping) and weights else ("made_up",)
    return GroupedRewards(
        rewards=torch.tensor([0.0, 1.0]),
        groups=torch.tensor([0, 0]),
        lengths=torch.tensor([1, 1]),
        baseline_rewards=torch.tensor([0.5, 0.5]),
        reward_parts={name: torch.tensor([0.0, 1.0]) for name in names},
        tokens=RolloutTokens(
            mask=tokens.mask,
            sequence_ids=tokens.sequence_ids,
            rewards=torch.zeros(2),
            values=None if config.critic is None else torch.zeros(2),
        ),
        truncated=torch.tensor([False, False]),
        end_values=torch.zeros(2),
    )


def _made_up(config: ObjectiveConfig) -> LossInputs:
    """Return two rollouts of one token and one group, with the optional columns it computes."""
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
