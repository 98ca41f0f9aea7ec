"""Corrections that only reject tokens or sequences too far off-policy."""

from typing import Annotated, Literal

import torch
from pydantic import Field

from learner.config.option_types import Finite, Positive
from learner.corrections.importance_weights import Correction, unweighted
from learner.losses.kl import kl_penalty
from learner.losses.loss_inputs import LossInputs


def kl_mask(
    inputs: LossInputs,
    *,
    threshold: Positive,
    estimator: Literal["k2", "k3"] = "k3",
    level: Literal["token", "sequence", "sequence_max"] = "token",
) -> Correction:
    """Reject tokens further than `threshold` nats from the sampler by an estimate of the KL.

    For tokens that the behaviour policy μ drew, k3 = ρ − 1 − log ρ with ρ = proximal / μ estimates
    KL(μ ‖ proximal) without bias; k2 = ½·(log ρ)². The level is "token", or of whole sequences the
    mean ("sequence") or the largest ("sequence_max").

    Stats count tokens: `kl_rejected`.
    """
    log_ratio = inputs.raw_behavior_log_ratio
    # The sampler is the policy of the estimate, the proximal policy its reference: d = −log ρ.
    distance = kl_penalty(estimator, torch.zeros_like(log_ratio), log_ratio)
    too_far = distance > threshold
    if level == "sequence":
        too_far = inputs.sequences.means(distance, inputs.trained) > threshold
    elif level == "sequence_max":
        too_far = inputs.sequences.sums(inputs.trained & too_far)[inputs.sequences.index] > 0
    rejected = inputs.trained & too_far
    return Correction(unweighted(inputs), ~rejected, {"kl_rejected": rejected.sum()})


def veto(inputs: LossInputs, *, threshold: Positive = 1e-4) -> Correction:
    """Reject a sequence that holds a token with proximal / behaviour below `threshold`.

    Stats count tokens: `vetoed`.
    """
    unlikely = inputs.trained & (inputs.behavior_log_ratio.exp() < threshold)
    rejected = inputs.trained & (inputs.sequences.totals(unlikely) > 0)
    return Correction(unweighted(inputs), ~rejected, {"vetoed": rejected.sum()})


def opsm(inputs: LossInputs, *, threshold: Finite = 0.5) -> Correction:
    """Off-policy sequence masking: reject tokens with A < 0 of a sequence far behind the policy.

    Far: mean_t (log behaviour − log current) > threshold. The current policy is meant, whether or
    not there is a proximal one. DeepSeek-V3.2 (arXiv 2512.02556, eq. 9).

    Stats count tokens: `opsm_rejected`.
    """
    ratio = inputs.raw_full_log_ratio.detach()
    behind = -inputs.sequences.means(ratio, inputs.trained)
    rejected = (inputs.gains < 0) & (behind > threshold)
    return Correction(unweighted(inputs), ~rejected, {"opsm_rejected": rejected.sum()})


def lag_mask(inputs: LossInputs, *, max_lag: Annotated[int, Field(ge=0)]) -> Correction:
    """Reject tokens whose lag is larger than `max_lag`, perhaps only the oldest of a rollout.

    Caps by lag are `tis` with `lag_caps`. Stats count tokens: `too_old`.
    """
    rejected = inputs.trained & (inputs.lags("lag_mask") > max_lag)
    return Correction(unweighted(inputs), ~rejected, {"too_old": rejected.sum()})
