"""Losses of preferences: a value of each pair, or of each text that is judged alone.

The value of a text is the sum over the tokens of its completion, or their mean, of log-ratios
current / reference, or of log-probabilities; `PREFERENCE_LOSSES` says which of them a loss takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from learner.config.option_types import Finite, Positive

Beta = Annotated[Positive, Field(allow_inf_nan=False)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


def logistic(margin: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """−(1 − ε)·log σ(β·z) − ε·log σ(−β·z) of margins z, ε = `label_smoothing`.

    Example:
        >>> logistic(torch.tensor([0.0]), beta=0.1)
        tensor([0.6931])
    """
    wrong, right = softplus(-beta * margin), softplus(beta * margin)
    return (1 - label_smoothing) * wrong + label_smoothing * right


def squared(margin: Tensor, *, beta: float) -> Tensor:
    """(z − 1/(2β))² of margins z."""
    return (margin - 1 / (2 * beta)).square()


def dpo(
    chosen: Tensor, rejected: Tensor, *, beta: Beta = 0.1, label_smoothing: Smoothing = 0.0
) -> Tensor:
    """`logistic` of chosen − rejected, of the values [P] of pairs.

    Rafailov et al. 2023 (arXiv 2305.18290, eq. 7); label smoothing: cDPO.
    """
    return logistic(chosen - rejected, beta=beta, label_smoothing=label_smoothing)


def ipo(chosen: Tensor, rejected: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """`squared` of chosen − rejected. Azar et al. 2023 (arXiv 2310.12036, eq. 17)."""
    return squared(chosen - rejected, beta=beta)


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: Beta = 2.0,
    gamma: Finite = 1.0,
    label_smoothing: Smoothing = 0.0,
) -> Tensor:
    """`logistic` of chosen − rejected − γ/β. Meng et al. 2024 (arXiv 2405.14734, eq. 6)."""
    margin = chosen - rejected - gamma / beta
    return logistic(margin, beta=beta, label_smoothing=label_smoothing)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """−β·log σ(log odds(chosen) − log odds(rejected)), odds(p) = p / (1 − p).

    Hong et al. 2024 (arXiv 2403.07691, eq. 6 and 7), without the likelihood of the better text.
    """
    log_odds = chosen - rejected - _log1mexp(chosen) + _log1mexp(rejected)
    return beta * logistic(log_odds, beta=1.0)


def kto(
    margin: Tensor,
    desirable: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: Finite = 1.0,
    undesirable_weight: Finite = 1.0,
) -> Tensor:
    """Weight · (1 − σ(β·z)), z = D − KL of `desirable` texts [T] bool, KL − D of the others.

    D are their log-ratios. Ethayarajh et al. 2024 (arXiv 2402.01306, eq. 7).
    """
    loss = torch.sigmoid(-beta * margin)
    return torch.where(desirable, desirable_weight * loss, undesirable_weight * loss)


def _log1mexp(logs: Tensor) -> Tensor:
    """Return log(1 − exp(x)) of x < 0; x that rounds to 0 is taken as the largest below it."""
    below = logs.clamp(max=-torch.finfo(logs.dtype).tiny)
    return torch.log(-torch.expm1(below))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss, and the values that it takes."""

    function: Callable[..., Tensor]
    inputs: tuple[str, str] = ("chosen", "rejected")
    referenced: bool = True
    """Log-ratios current / reference; false: log-probabilities."""
    mean: bool = False
    """Means over tokens; false: sums."""
    likelihood: bool = False
    """Added is the negative log-likelihood of the better texts, a mean over all their tokens,
    prompts included, as in the authors' code and TRL."""


PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(function=dpo),
    "ipo": PreferenceLoss(function=ipo, mean=True),
    "kto": PreferenceLoss(function=kto, inputs=("margin", "desirable")),
    "orpo": PreferenceLoss(function=orpo, referenced=False, mean=True, likelihood=True),
    "simpo": PreferenceLoss(function=simpo, referenced=False, mean=True),
}
