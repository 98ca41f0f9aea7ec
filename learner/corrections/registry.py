"""Registration of corrections, their lookup by name, and their composition."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import InputError
from learner.config.traits import CORRECTION_TRAITS, CorrectionTraits
from learner.losses.checks import require_bounds
from learner.losses.loss_inputs import LossInputs, count_outside
from learner.registry import Registered, Registry, options_of, refuse_unknown_options


@dataclass(frozen=True)
class Correction:
    """Weights of the tokens of a microbatch."""

    weights: Tensor
    """[N], detached; 1 where a token does not train, 0 where its ratio is rejected."""
    keep: Tensor
    """[N] bool; false where the token is rejected."""
    stats: Mapping[str, Tensor]
    """Counts of tokens, each a scalar."""


class ImportanceWeights(Registered[Correction, CorrectionTraits]):
    """A registered correction."""


CORRECTIONS = Registry("correction", ImportanceWeights, CORRECTION_TRAITS)


def correction(
    name: str, **traits: Any
) -> Callable[[Callable[..., Correction]], ImportanceWeights]:
    """Register `(inputs: LossInputs, *, options) -> Correction`.

    The keywords are the fields of `CorrectionTraits`.

    Raises:
        InputError: The name is taken.
    """
    return CORRECTIONS.decorator(name, traits=CorrectionTraits(**traits))


def unweighted(inputs: LossInputs) -> Tensor:
    """Return ones of the ratio's dtype, [N]."""
    return torch.ones_like(inputs.behavior_log_ratio)


def kept(inputs: LossInputs) -> Tensor:
    """Return true for every token, [N]."""
    return torch.ones_like(inputs.mask)


def outside_band(inputs: LossInputs, ratio: Tensor, name: str, low: float, high: float) -> Tensor:
    """Return the trained tokens whose `ratio` [N] is not in [low, high], [N] bool.

    Raises:
        InputError: Bounds out of order; names the correction.
    """
    require_bounds(name, low, high)
    return inputs.trained & ((ratio < low) | (ratio > high))


def importance_weights(name: str | Sequence[str], inputs: LossInputs, **options: Any) -> Correction:
    """Compute the weights of one correction, or the product of several; all must keep a token.

    Without `proximal_logprobs` the numerator is the current policy, detached, which is exact for
    one optimizer step per batch. An option goes to every named correction with a parameter of that
    name; under the name of a correction, a mapping of options goes to that correction alone.

    Returns:
        Stats of all of them, and `weight_bounded`: tokens whose log-ratio is beyond ± 20.

    Raises:
        InputError: An unknown name, an option that none of them takes, bounds out of order, or
            inputs without a field that one of them needs.
    """
    names = [name] if isinstance(name, str) else name
    entries = [CORRECTIONS[item] for item in names]
    known = [options_of(entry.function) for entry in entries]
    shared = {key: value for key, value in options.items() if key not in names}
    refuse_unknown_options(f"correction {name!r}", shared, {item for own in known for item in own})
    outside = count_outside(inputs.raw_behavior_log_ratio, inputs.trained)
    total = Correction(unweighted(inputs), kept(inputs), {"weight_bounded": outside})
    for item, entry, own in zip(names, entries, known, strict=True):
        chosen = {key: shared[key] for key in own if key in shared} | _own(item, options, own)
        part = entry.function(inputs, **chosen)
        total = Correction(
            total.weights * part.weights, total.keep & part.keep, {**total.stats, **part.stats}
        )
    return total


def _own(name: str, options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    own = options.get(name, {})
    if not isinstance(own, Mapping):
        raise InputError(f"options of correction {name!r} must be a table, found {own!r}")
    refuse_unknown_options(f"correction {name!r}", own, known)
    return dict(own)
