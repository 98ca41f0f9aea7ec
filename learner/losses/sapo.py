"""SAPO: a smooth gate on the ratio instead of a hard clip.

Gao et al. 2025 (arXiv 2511.20347). The paper aggregates by `sequence_mean`.
"""

from typing import Annotated

import torch
from pydantic import Field

from learner.config.option_types import Positive
from learner.losses.loss_inputs import LossInputs, TokenLoss, count_outside

Tau = Annotated[Positive, Field(allow_inf_nan=False)]


def sapo(inputs: LossInputs, *, tau_positive: Tau = 1.0, tau_negative: Tau = 1.05) -> TokenLoss:
    """ℓ_t = −A · f(r), f(r) = σ(τ·(r − 1)) · 4/τ, r = current / anchor.

    τ is `tau_positive` where A > 0, else `tau_negative`. f′(1) = 1, so that on-policy the gradient
    is REINFORCE's; away from 1 it decays with 4·p(1 − p), p = σ(τ·(r − 1)). The value itself is
    offset: f(1) = 2/τ.

    Stats count tokens: `damped` (their gradient weight 4·p(1 − p) is below one half),
    `ratio_bounded` (log-ratio beyond ± 20).
    """
    ratio, gains = inputs.log_ratio.exp(), inputs.gains
    tau = torch.where(gains > 0, tau_positive, ratio.new_tensor(tau_negative))
    gate = torch.sigmoid(tau * (ratio - 1))
    damped = inputs.trained & (4 * gate.detach() * (1 - gate.detach()) < 0.5)
    outside = count_outside(inputs.raw_log_ratio, inputs.trained)
    return TokenLoss(-gains * gate * 4 / tau, {"damped": damped.sum(), "ratio_bounded": outside})
