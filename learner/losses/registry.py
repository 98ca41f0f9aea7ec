"""Registration of policy losses, and their lookup by name."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from learner.config.traits import LOSS_TRAITS, Anchor, LossTraits, Unit
from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.registry import Registry, options_of, refuse_unknown_options


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss."""

    name: str
    function: Callable[..., TokenLoss]
    traits: LossTraits

    def __call__(self, inputs: LossInputs, **options: Any) -> TokenLoss:
        """Return the loss per token of `inputs`."""
        return self.function(inputs, **options)


LOSSES = Registry("loss", PolicyLoss)


def built_in_loss(*names: str) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    """Register a policy loss with its traits from `LOSS_TRAITS`, under one or more names."""
    return _decorator(names, LOSS_TRAITS[names[0]])


def policy_loss_function(
    *names: str,
    owns_is: bool,
    anchor: Anchor = "proximal",
    off_policy: bool = False,
    unit: Unit = "token",
    aggregations: tuple[str, ...] | None = None,
    needs: Collection[str] = (),
    by_option: Mapping[str, Mapping[Any, Mapping[str, Any]]] | None = None,
) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    """Register `(inputs: LossInputs, *, options) -> TokenLoss` under one or more names.

    The first name is the loss's own; the keywords are described in `LossTraits`.

    Raises:
        InputError: A name is taken.

    Example:
        >>> @policy_loss_function("push", owns_is=False)
        ... def push(inputs):
        ...     return TokenLoss(-inputs.current, {})
    """
    traits = LossTraits(
        owns_is=owns_is,
        anchor=anchor,
        off_policy=off_policy,
        unit=unit,
        aggregations=aggregations,
        needs=frozenset(needs),
        by_option=by_option or {},
    )
    return _decorator(names, traits)


def _decorator(
    names: tuple[str, ...], traits: LossTraits
) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    return LOSSES.decorator(*names, make=lambda function: PolicyLoss(names[0], function, traits))


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
