"""Divergence of the policy from teachers, on the tokens that the policy sampled.

With p the policy's and q the teacher's distribution of the next token, over the teacher's K
likeliest words and one more category for all the others:

    reverse_kl  Σ p·log(p/q)      forward_kl  Σ q·log(q/p)
    jsd         β·KL(q ‖ m) + (1 − β)·KL(p ‖ m),  m = β·q + (1 − β)·p

Agarwal et al. 2023, "On-Policy Distillation of Language Models" (arXiv 2306.13649).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from learner.config.distillation import DistillationConfig
from learner.losses.kl import kl_loss
from learner.losses.loss_inputs import LossInputs
from learner.sums import Sums

LEAST = -100.0
"""Least log-probability that counts, so that a word which a model excludes has a finite one."""


@dataclass(frozen=True, kw_only=True)
class TeacherSums(Sums):
    """Sums over the trained tokens that each of T teachers teaches."""

    divergence: Tensor  # [T] nats
    tokens: Tensor  # [T]


class Distillation(NamedTuple):
    """The term of the loss, before any reduction."""

    per_token: Tensor  # [N] with gradient, the mean over teachers; 0 where a token does not train
    sums: TeacherSums
    not_finite: Tensor  # tokens that train, which a teacher gives no number


def distillation(
    config: DistillationConfig,
    inputs: LossInputs,
    teachers: Tensor,
    shares: Tensor,
    own: Tensor | None,
) -> Distillation:
    """Compute the mean over T teachers of the policy's divergence from each.

    Args:
        config: The divergence; with `top_k` = 0 its estimate from the sampled tokens, the form
            `weighted_k2` of `kl_loss`, whose expected gradient is that of the reverse KL.
        inputs: The microbatch.
        teachers: [N, T, K] log-probabilities of the teachers' likeliest words; with `top_k` = 0
            [N, T, 1] of the sampled tokens.
        shares: [N, T] of each teacher in the mean; 0 where it does not teach.
        own: [N, T, K] the policy's log-probabilities of the same words; None with `top_k` = 0.
    """
    trained = inputs.trained[:, None] & (shares > 0)
    if own is None:
        usable = trained & torch.isfinite(teachers[..., 0])
        estimates = [
            kl_loss("weighted_k2", replace(inputs, reference_logprobs=column)).per_token
            for column in teachers[..., 0].unbind(1)
        ]
        divergences = torch.stack(estimates, dim=1)
    else:
        usable = trained & ~teachers.isnan().any(-1)
        mine, theirs = (torch.where(usable[..., None], x, -1e3) for x in (own, teachers))
        divergences = divergence(config.divergence, mine, theirs, beta=config.beta)
    divergences = torch.where(usable, divergences, 0.0)
    sums = TeacherSums(divergence=divergences.detach().sum(0), tokens=usable.sum(0))
    return Distillation((shares * divergences).sum(-1), sums, (trained & ~usable).any(-1).sum())


def divergence(name: str, own: Tensor, teacher: Tensor, *, beta: float = 0.5) -> Tensor:
    """Compute a divergence from log-probabilities [..., K] of the same K words, [...] nats.

    It is exact for the distributions over these words and the rest as one more, so that it is at
    most that of the whole distributions, and equal where K is the whole vocabulary.
    """
    p, q = with_rest(own), with_rest(teacher)
    if name == "reverse_kl":
        return _kl(p, q)
    if name == "forward_kl":
        return _kl(q, p)
    mixture = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
    return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def with_rest(logprobs: Tensor) -> Tensor:
    """Add the log-probability of all other words to those of some, [..., K] to [..., K + 1].

    What rounding leaves of a rest of 0 counts as the smallest difference from 1, without gradient.
    """
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    rest = rest.clamp(min=torch.finfo(logprobs.dtype).eps).log()
    return torch.cat([logprobs, rest], dim=-1).clamp(min=LEAST)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)
