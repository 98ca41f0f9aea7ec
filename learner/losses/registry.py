"""How a policy loss is registered and found by name, and what it says about itself."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.registry import Registry, options_of, refuse_unknown_options

Anchor = Literal["proximal", "behavior"]
Unit = Literal["token", "sequence", "group"]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss: what it computes, and what must hold where it is used."""

    name: str
    function: Callable[..., TokenLoss]
    owns_is: bool
    """It weighs tokens by current / anchor itself. Where the anchor is the behaviour policy, an
    importance weight on top would count the ratio twice."""
    anchor: Anchor = "proximal"
    """`proximal`: the proximal policy where one is computed, else the behaviour policy.
    `behavior`: the behaviour policy always."""
    off_policy: bool = False
    """Right, or meant, for stale rollouts without any correction, whatever the anchor."""
    unit: Unit = "token"
    """What must lie whole in one row."""
    aggregations: tuple[str, ...] | None = None
    """Modes of `learner.batch.token_weights` under which the loss is what it claims; None: all."""
    needs: frozenset[str] = frozenset()
    """Optional fields of `LossInputs` that it cannot do without."""
    by_option: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    """Option → value → those of the fields above that differ under this value."""

    def __call__(self, inputs: LossInputs, **options: Any) -> TokenLoss:
        """The loss per token of `inputs`."""
        return self.function(inputs, **options)

    def under(self, options: Mapping[str, Any]) -> "PolicyLoss":
        """What the loss says about itself when it is used with these options."""
        parameters = inspect.signature(self.function).parameters
        changes: dict[str, Any] = {}
        for option, values in self.by_option.items():
            changes |= values.get(options.get(option, parameters[option].default), {})
        return replace(self, **changes)


LOSSES = Registry("loss", PolicyLoss)


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
    """Registers `(inputs: LossInputs, *, options) -> TokenLoss` under one or more names.

    Args:
        *names: The first is the loss's own.
        owns_is: See `PolicyLoss`, as for the others.
        anchor: Of its ratio.
        off_policy: Stale rollouts need no correction.
        unit: What must lie whole in a row.
        aggregations: The modes allowed; None: all.
        needs: Optional fields of `LossInputs`.
        by_option: Where an option changes one of these.

    Example:
        >>> @policy_loss_function("push", owns_is=False)
        ... def push(inputs):
        ...     return TokenLoss(-inputs.current, {})
    """

    def register(function: Callable[..., TokenLoss]) -> PolicyLoss:
        loss = PolicyLoss(
            names[0],
            function,
            owns_is,
            anchor,
            off_policy,
            unit,
            aggregations,
            frozenset(needs),
            by_option or {},
        )
        for name in names:
            LOSSES.add(name, loss)
        return loss

    return register


def policy_loss(name: str, inputs: LossInputs, **options: Any) -> TokenLoss:
    """The loss per token by a named policy loss; nothing is reduced.

    Args:
        name: One of `LOSSES`, or "module:function" of a decorated function.
        inputs: One packed row.
        **options: The loss's own.

    Raises:
        InputError: An unknown name or option, bounds that contradict each other, or inputs without
            a field that the loss needs.
    """
    loss = LOSSES[name]
    refuse_unknown_options(f"loss {name!r}", options, options_of(loss.function))
    return loss.function(inputs, **options)
