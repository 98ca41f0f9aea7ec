"""How a policy loss is registered and found by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from learner.losses.inputs import LossInputs, TokenLoss
from learner.registry import Registry, options_of, refuse_unknown_options


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss."""

    name: str
    function: Callable[..., TokenLoss]
    owns_is: bool
    """It weighs tokens by current / anchor itself. Where the anchor is the behaviour policy, an
    importance weight on top would count the ratio twice."""

    def __call__(self, inputs: LossInputs, **options: Any) -> TokenLoss:
        """The loss per token of `inputs`."""
        return self.function(inputs, **options)


LOSSES = Registry("loss", PolicyLoss)


def policy_loss_function(
    *names: str, owns_is: bool
) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    """Registers `(inputs: LossInputs, *, options) -> TokenLoss` under one or more names.

    Example:
        >>> @policy_loss_function("push", owns_is=False)
        ... def push(inputs):
        ...     return TokenLoss(-inputs.current, {})
    """

    def register(function: Callable[..., TokenLoss]) -> PolicyLoss:
        loss = PolicyLoss(names[0], function, owns_is)
        for name in names:
            LOSSES.add(name, loss)
        return loss

    return register


def policy_loss(name: str, inputs: LossInputs, **options: Any) -> TokenLoss:
    """The loss per token by a named policy loss; nothing is reduced.

    Args:
        name: reinforce, ppo (= grpo), cispo, or "module:function" of a decorated function.
        inputs: One packed row.
        **options: The loss's own.

    Raises:
        InputError: An unknown name or option, or bounds that contradict each other.
    """
    loss = LOSSES[name]
    refuse_unknown_options(f"loss {name!r}", options, options_of(loss.function))
    return loss.function(inputs, **options)
