"""Whether advantage, loss and corrections go together; they are loaded, asked and tried out.

What a recipe alone tells, without loading torch, is checked in `objective_config`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from learner.advantages import ESTIMATORS, compute_advantages
from learner.batch.token_weights import token_weights
from learner.config.objective import ObjectiveConfig
from learner.corrections import CORRECTIONS, importance_weights
from learner.errors import InputError
from learner.losses import LOSSES, LossInputs, PolicyLoss, TokenLoss, policy_loss
from learner.registry import options_of, refuse_unknown_options, refuse_wrong_options


def check_objective(config: ObjectiveConfig) -> None:
    """Computes the objective of made-up rollouts of one group.

    Raises:
        InputError: An unknown name or option, a value that does not fit, a ratio that would count
            twice, or something needed that nothing computes.
    """
    _check_options(config)
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


def _check_options(config: ObjectiveConfig) -> None:
    """Every option is one that its function takes, and of the type that it says."""
    for setting, name, function, given in (
        (
            "learner.advantage_options",
            config.advantage,
            ESTIMATORS[config.advantage].function,
            config.advantage_options,
        ),
        ("learner.loss_options", config.loss, LOSSES[config.loss].function, config.loss_options),
    ):
        refuse_wrong_options(setting, name, function, given)
    options, names = config.correction_options, config.corrections
    functions = {name: CORRECTIONS[name].function for name in names}
    known = {key for function in functions.values() for key in options_of(function)}
    setting = "learner.correction_options"
    refuse_unknown_options(f"{setting}: {' and '.join(names) or 'none'}", options, known | {*names})
    for name, corrects in functions.items():
        shared = {key: options[key] for key in options_of(corrects) if key in options}
        own = options.get(name, {})
        chosen = {**shared, **own} if isinstance(own, Mapping) else own
        refuse_wrong_options(setting, name, corrects, chosen)


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
