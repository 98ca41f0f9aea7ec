"""CISPO: a capped, detached importance weight on REINFORCE, so no token loses its gradient.

MiniMax-M1 (arXiv 2506.13585, eq. 4-5); with an absolute cap as in ScaleRL (arXiv 2510.13786).
"""

from learner.losses.loss_inputs import LossInputs, TokenLoss, check_bounds, count_outside


def cispo(inputs: LossInputs, *, cap_low: float = 0.0, cap_high: float = 5.0) -> TokenLoss:
    """ℓ_t = −sg(clip(r, cap_low, cap_high)) · A · log π(y_t), r = current / anchor.

    Stats count tokens: `capped`, whatever the sign of their advantage, and `ratio_bounded`
    (log-ratio beyond ± 20).
    """
    check_bounds("cispo's cap_low and cap_high", cap_low, cap_high)
    ratio = inputs.log_ratio.detach().exp()
    capped = inputs.trained & ((ratio < cap_low) | (ratio > cap_high))
    per_token = -ratio.clamp(cap_low, cap_high) * inputs.gains * inputs.current
    outside = count_outside(inputs.raw_log_ratio, inputs.trained)
    return TokenLoss(per_token, {"capped": capped.sum(), "ratio_bounded": outside})
