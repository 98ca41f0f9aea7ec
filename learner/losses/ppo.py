"""PPO's clipped surrogate, which GRPO and DAPO share.

Schulman et al. 2017 (arXiv 1707.06347, eq. 7); dual clip: Ye et al. 2019 (arXiv 1912.09729).
"""

import torch
from torch import Tensor

from headway.errors import InputError
from learner.losses.loss_inputs import LossInputs, TokenLoss, count_outside


def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """ℓ_t = max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)); for A < 0 at most −dual_clip·A.

    r is current / anchor. The gradient is 0 where the clip is active. `dual_clip` is absolute,
    above 1 + clip_high; None switches it off.

    Stats count tokens: `clip_low` (A < 0 and r too small), `clip_high` (A > 0 and r too large),
    `dual_clip`, and `ratio_bounded` (log-ratio beyond ± 20).
    """
    ratio = inputs.log_ratio.exp()
    return clipped(inputs, inputs.raw_log_ratio, ratio, clip_low, clip_high, dual_clip)


def dapo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """`ppo` with clip-higher: the ratio is kept in [0.8, 1.28], so that rare tokens can still grow.

    Yu et al. 2025 (arXiv 2503.14476).
    """
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped(
    inputs: LossInputs,
    raw_log_ratio: Tensor,
    ratio: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Compute PPO's surrogate of any `ratio` [N], which carries the gradient; see `ppo`.

    `raw_log_ratio` [N] is its logarithm before it was bounded.

    Raises:
        InputError: Bounds out of order.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise InputError(
            f"clipping needs 0 <= clip_low <= 1 and clip_high >= 0, "
            f"found {clip_low} and {clip_high}"
        )
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise InputError(
            f"dual_clip must be above 1 + clip_high = {1 + clip_high}, found {dual_clip}"
        )
    gains, low, high = inputs.gains, 1 - clip_low, 1 + clip_high
    per_token = torch.maximum(-gains * ratio, -gains * ratio.clamp(low, high))
    stats = {
        "clip_low": ((gains < 0) & (ratio < low)).sum(),
        "clip_high": ((gains > 0) & (ratio > high)).sum(),
        "ratio_bounded": count_outside(raw_log_ratio, inputs.trained),
    }
    if dual_clip is not None:
        active = (gains < 0) & (ratio > dual_clip)
        per_token = torch.where(active, -dual_clip * gains, per_token)
        stats["dual_clip"] = active.sum()
    return TokenLoss(per_token, stats)
