"""Registration of corrections, their lookup by name, and their composition."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.options import check_options
from headway.registry import Entry
from headway.user_code import options_of, refuse_unknown_options
from learner.config.traits import CORRECTIONS, CorrectionTraits
from learner.losses.loss_inputs import LossInputs, check_bounds, count_outside

SETTING = "learner.correction_options"


@dataclass(frozen=True)
class Correction:
    """Weights of the tokens of a microbatch."""

    weights: Tensor  # [N], detached; 1 where a token does not train, 0 where its ratio is rejected
    keep: Tensor  # [N] bool; false where the token is rejected
    stats: Mapping[str, Tensor]  # counts of tokens, each a scalar


def correction(
    name: str, **traits: Any
) -> Callable[[Callable[..., Correction]], Entry[CorrectionTraits]]:
    """Register `(inputs: LossInputs, *, options) -> Correction`.

    The keywords are the fields of `CorrectionTraits`.

    Raises:
        InputError: The name is taken.
    """
    return CORRECTIONS.register(name, **traits)


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
    check_bounds(name, low, high)
    return inputs.trained & ((ratio < low) | (ratio > high))


def importance_weights(name: str | Sequence[str], inputs: LossInputs, **options: Any) -> Correction:
    """Compute the weights of one correction, or the product of several; all must keep a token.

    Without `proximal_logprobs` the numerator is the current policy, detached, which is exact for
    one optimizer step per batch. An option goes to every named correction with a parameter of that
    name; under the name of a correction, a mapping of options goes to that correction alone.

    Returns:
        Stats of all of them, and `weight_bounded`: tokens whose log-ratio is beyond ± 20.

    Raises:
        InputError: An unknown name, an option that none of them takes, a value that does not fit,
            bounds out of order, or inputs without a field that one of them needs.
    """
    names = [name] if isinstance(name, str) else name
    functions = {item: CORRECTIONS[item].function for item in names}
    known = {key for function in functions.values() for key in options_of(function, "inputs")}
    subject = f"{SETTING}: {' and '.join(functions) or 'none'}"
    refuse_unknown_options(subject, options, known | {*functions})
    outside = count_outside(inputs.raw_behavior_log_ratio, inputs.trained)
    total = Correction(unweighted(inputs), kept(inputs), {"weight_bounded": outside})
    for item, function in functions.items():
        shared = {key: options[key] for key in options_of(function, "inputs") if key in options}
        own = options.get(item, {})
        chosen = {**shared, **own} if isinstance(own, Mapping) else own
        check_options(function, "inputs", setting=SETTING, name=item, options=chosen)
        part = function(inputs, **chosen)
        total = Correction(
            total.weights * part.weights, total.keep & part.keep, {**total.stats, **part.stats}
        )
    return total
