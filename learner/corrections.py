"""Importance weights for what the loss does not correct itself: proximal over behaviour policy.

Weights are detached and multiply the policy loss per token, after its clip and before aggregation;
never a KL, entropy or value term. Denominators stay those of all tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.errors import InputError
from learner.losses.inputs import LossInputs
from learner.registry import Registry, options_of, refuse_unknown_options


@dataclass(frozen=True)
class Correction:
    """How much each token of a packed row counts."""

    weights: Tensor
    """[N], detached; 1 where a token does not train."""
    keep: Tensor
    """[N] bool; false where the token is rejected."""
    stats: Mapping[str, Tensor]
    """Counts of tokens, each a scalar."""


@dataclass(frozen=True)
class ImportanceWeights:
    """A registered correction."""

    name: str
    function: Callable[..., Correction]


CORRECTIONS = Registry("correction", ImportanceWeights)


def correction(name: str) -> Callable[[Callable[..., Correction]], ImportanceWeights]:
    """Registers `(inputs: LossInputs, *, options) -> Correction`."""

    def register(function: Callable[..., Correction]) -> ImportanceWeights:
        entry = ImportanceWeights(name, function)
        CORRECTIONS.add(name, entry)
        return entry

    return register


@correction("none")
def none(inputs: LossInputs) -> Correction:
    """Every token counts once."""
    weights = torch.ones_like(inputs.behavior_log_ratio)
    return Correction(weights, torch.ones_like(inputs.mask), {})


@correction("tis")
def tis(inputs: LossInputs, *, cap: float = 2.0) -> Correction:
    """Truncated importance sampling per token: min(ρ_t, cap), ρ = proximal / behaviour.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; cap 2 as in verl, slime and open-instruct.

    Returns:
        Stats count tokens: `truncated`.

    Raises:
        InputError: The cap is not positive.
    """
    if cap <= 0:
        raise InputError(f"tis needs cap > 0, found {cap}")
    ratio = inputs.behavior_log_ratio.exp()
    truncated = (inputs.trained & (ratio > cap)).sum()
    return Correction(ratio.clamp(max=cap), torch.ones_like(inputs.mask), {"truncated": truncated})


def importance_weights(name: str | Sequence[str], inputs: LossInputs, **options: Any) -> Correction:
    """Weights of one correction, or of several: the product of weights, and kept by all.

    With no `proximal_logprobs` the numerator is the current policy, detached: exact for one
    optimizer step per batch.

    Args:
        name: none, tis, "module:function" of a decorated function, or a list of them.
        inputs: One packed row.
        **options: Each goes to every named correction that has a parameter of that name.

    Raises:
        InputError: An unknown name, or an option that none of them takes.
    """
    entries = [CORRECTIONS[item] for item in ([name] if isinstance(name, str) else name)]
    known = [options_of(entry.function) for entry in entries]
    refuse_unknown_options(f"correction {name!r}", options, {item for own in known for item in own})
    total = none.function(inputs)
    for entry, own in zip(entries, known, strict=True):
        part = entry.function(inputs, **{key: options[key] for key in own if key in options})
        total = Correction(
            total.weights * part.weights, total.keep & part.keep, {**total.stats, **part.stats}
        )
    return total
