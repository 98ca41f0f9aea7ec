"""Registration of policy losses, and their lookup by name."""

from collections.abc import Callable
from typing import Any

from headway.options import check_options
from headway.registry import Entry
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
        InputError: An unknown name or option, a value that does not fit, bounds that contradict
            each other, or inputs without a field that the loss needs.
    """
    function = LOSSES[name].function
    check_options(function, "inputs", setting="learner.loss_options", name=name, options=options)
    loss: TokenLoss = function(inputs, **options)
    return loss
