"""Corrections that only reject tokens or sequences too far off-policy."""

import torch

from headway.errors import InputError
from learner.corrections.importance_weights import Correction, unweighted
from learner.losses.kl import kl_penalty
from learner.losses.loss_inputs import LossInputs
from learner.losses.option_checks import require_finite, require_one_of, require_positive


def kl_mask(
    inputs: LossInputs, *, threshold: float, estimator: str = "k3", level: str = "token"
) -> Correction:
    """Reject tokens further than `threshold` nats from the sampler by an estimate of the KL.

    For tokens that the behaviour policy μ drew, k3 = ρ − 1 − log ρ with ρ = proximal / μ estimates
    KL(μ ‖ proximal) without bias; k2 = ½·(log ρ)². The level is "token", or of whole sequences the
    mean ("sequence") or the largest ("sequence_max").

    Stats count tokens: `kl_rejected`.
    """
    require_one_of("kl_mask's estimator", estimator, ("k2", "k3"))
    require_one_of("kl_mask's level", level, ("token", "sequence", "sequence_max"))
    require_positive("kl_mask's threshold", threshold)
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


def veto(inputs: LossInputs, *, threshold: float = 1e-4) -> Correction:
    """Reject a sequence that holds a token with proximal / behaviour below `threshold`.

    Stats count tokens: `vetoed`.
    """
    require_positive("veto's threshold", threshold)
    unlikely = inputs.trained & (inputs.behavior_log_ratio.exp() < threshold)
    rejected = inputs.trained & (inputs.sequences.totals(unlikely) > 0)
    return Correction(unweighted(inputs), ~rejected, {"vetoed": rejected.sum()})


def opsm(inputs: LossInputs, *, threshold: float = 0.5) -> Correction:
    """Off-policy sequence masking: reject tokens with A < 0 of a sequence far behind the policy.

    Far: mean_t (log behaviour − log current) > threshold. The current policy is meant, whether or
    not there is a proximal one. DeepSeek-V3.2 (arXiv 2512.02556, eq. 9).

    Stats count tokens: `opsm_rejected`.
    """
    require_finite("opsm's threshold", threshold)
    ratio = inputs.raw_full_log_ratio.detach()
    behind = -inputs.sequences.means(ratio, inputs.trained)
    rejected = (inputs.gains < 0) & (behind > threshold)
    return Correction(unweighted(inputs), ~rejected, {"opsm_rejected": rejected.sum()})


def lag_mask(inputs: LossInputs, *, max_lag: int) -> Correction:
    """Reject tokens whose lag is larger than `max_lag`, perhaps only the oldest of a rollout.

    Caps by lag are `tis` with `lag_caps`. Stats count tokens: `too_old`.
    """
    if max_lag < 0:
        raise InputError(f"lag_mask needs max_lag >= 0, found {max_lag}")
    rejected = inputs.trained & (inputs.lags("lag_mask") > max_lag)
    return Correction(unweighted(inputs), ~rejected, {"too_old": rejected.sum()})
