"""KL divergence from a reference policy: estimates, terms of the loss, a controller.

With x drawn from the sampling policy and d = log policy(x) − log reference(x):

    k1 = d                 k2 = ½·d²                 k3 = exp(−d) − 1 + d

Schulman 2020, "Approximating KL divergence".
"""

import torch
from torch import Tensor

from headway.errors import InputError
from learner.config.objective_rules import RATIO_FORMS
from learner.losses.loss_inputs import LOG_RATIO_BOUND, LossInputs, TokenLoss, bounded

ESTIMATORS = ("k1", "k2", "k3")
FORMS = (*ESTIMATORS, *RATIO_FORMS)


def kl_penalty(
    estimator: str, logprobs: Tensor, reference_logprobs: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy ‖ reference) per token, [N], differentiable in `logprobs` [N].

    k1 and k3 are unbiased for tokens of the policy, k2 to second order; k2 and k3 are ≥ 0. Only
    the exponent of k3 is bounded: its d is at least −20. The result is 0 where `mask` [N] is false,
    or where a log-probability is not finite.

    Raises:
        InputError: Another estimator than k1, k2 or k3.
    """
    if estimator not in ESTIMATORS:
        raise InputError(f"the KL estimator is {estimator!r}; allowed: {', '.join(ESTIMATORS)}")
    usable = torch.isfinite(logprobs) & torch.isfinite(reference_logprobs)
    if mask is not None:
        usable &= mask
    policy, reference = (torch.where(usable, x, 0.0) for x in (logprobs, reference_logprobs))
    return _estimate(estimator, policy - reference)


def kl_loss(form: str, inputs: LossInputs, *, cap: float = 5.0) -> TokenLoss:
    """Compute a term for the loss that pulls the current policy towards the reference.

    With r = current / behaviour policy:

        weighted_k2     sg(min(r, cap))·k2, whose value is sg(min(r, cap))·k3
        ratio_k1, _k3   r·k1, r·k3 (DeepSeek-V3.2's unbiased KL)
        k1, k2, k3      as they are

    `learner/docs/objectives.md` has their expected gradients. The ratio is to the behaviour policy
    whatever the anchor of the policy loss, because corrections never multiply this term.

    Stats: `kl` (Σ min(r, cap)·k3 over tokens; over their count an estimate of the KL in nats), and
    the count of tokens `reference_not_finite`.

    Raises:
        InputError: No reference.
    """
    distance = inputs.reference_log_ratio
    ratio = bounded(inputs.raw_full_log_ratio).exp()
    weight = ratio.detach().clamp(max=cap)
    estimate = (weight * _estimate("k3", distance)).detach()
    if form == "weighted_k2":
        pull = weight * _estimate("k2", distance)
        per_token = estimate + pull - pull.detach()
    elif form in ESTIMATORS:
        per_token = _estimate(form, distance)
    else:
        per_token = ratio * _estimate(form.removeprefix("ratio_"), distance)
    missing = inputs.trained & ~inputs.referenced
    return TokenLoss(per_token, {"kl": estimate.sum(), "reference_not_finite": missing.sum()})


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: float, samples: int
) -> float:
    """Return the KL coefficient after a batch: Ziegler et al. 2019 (arXiv 1909.08593, §2.2).

    β·(1 + e·min(samples/horizon, 1)), e = clip(KL/target − 1, −0.2, 0.2): a batch of `samples`
    rollouts changes β by a fifth at most, so that it stays positive. `kl` is a mean over the batch,
    in the unit of `target`.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(samples / horizon, 1))


def _estimate(estimator: str, distance: Tensor) -> Tensor:
    """Estimate from d [N]; its gradient is alive at any distance, but for k3 below −20."""
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return distance.square() / 2
    return k3(-distance)


def k3(log_ratios: Tensor) -> Tensor:
    """Estimate KL(behaviour ‖ current) per token of the behaviour policy: ρ − 1 − log ρ ≥ 0.

    Unbiased; `log_ratios` [N] is log of current / behaviour, of which at most 20 counts, so that
    `exp` stays finite.
    """
    clamped = log_ratios.clamp(max=LOG_RATIO_BOUND)
    return clamped.expm1() - clamped
