"""Registration of policy losses, and their lookup by name."""

from collections.abc import Callable
from typing import Any

from headway.registry import Entry
from headway.user_code import options_of, refuse_unknown_options
from learner.config.traits import LOSSES, LossTraits
from learner.losses.loss_inputs import LossInputs, TokenLoss


def policy_loss_function(
    *names: str, **traits: Any
) -> Callable[[Callable[..., TokenLoss]], Entry[LossTraits]]:
    """Register `(inputs: LossInputs, *, options) -> TokenLoss` under one or more names.

    The first name is the loss's own; the keywords are the fields of `LossTraits`.

    Raises:
        InputError: A name is taken.

    Example:
        >>> @policy_loss_function("push", owns_is=False)
        ... def push(inputs):
        ...     return TokenLoss(-inputs.current, {})
    """
    return LOSSES.register(*names, **traits)


def policy_loss(name: str, inputs: LossInputs, **options: Any) -> TokenLoss:
    """Return the loss per token by a named policy loss; nothing is reduced.

    `name` is one of `LOSSES`, or "module:function" of a decorated function.

    Raises:
        InputError: An unknown name or option, bounds that contradict each other, or inputs without
            a field that the loss needs.
    """
    function = LOSSES[name].function
    refuse_unknown_options(f"loss {name!r}", options, options_of(function, "inputs"))
    loss: TokenLoss = function(inputs, **options)
    return loss
