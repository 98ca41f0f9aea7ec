"""Registration of policy losses, and their lookup by name."""

from collections.abc import Callable
from typing import Any

from learner.config.traits import LOSS_TRAITS, LossTraits
from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.registry import Registered, Registry, options_of, refuse_unknown_options


class PolicyLoss(Registered[TokenLoss, LossTraits]):
    """A registered policy loss."""


LOSSES = Registry("loss", PolicyLoss, LOSS_TRAITS)


def policy_loss_function(
    *names: str, **traits: Any
) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    """Register `(inputs: LossInputs, *, options) -> TokenLoss` under one or more names.

    The first name is the loss's own; the keywords are the fields of `LossTraits`.

    Raises:
        InputError: A name is taken.

    Example:
        >>> @policy_loss_function("push", owns_is=False)
        ... def push(inputs):
        ...     return TokenLoss(-inputs.current, {})
    """
    return LOSSES.decorator(*names, traits=LossTraits(**traits))


def policy_loss(name: str, inputs: LossInputs, **options: Any) -> TokenLoss:
    """Return the loss per token by a named policy loss; nothing is reduced.

    `name` is one of `LOSSES`, or "module:function" of a decorated function.

    Raises:
        InputError: An unknown name or option, bounds that contradict each other, or inputs without
            a field that the loss needs.
    """
    loss = LOSSES[name]
    refuse_unknown_options(f"loss {name!r}", options, options_of(loss.function))
    return loss.function(inputs, **options)
