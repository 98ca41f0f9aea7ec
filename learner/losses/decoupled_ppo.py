"""Decoupled PPO: the clip is about the proximal policy, the importance weight about the behaviour.

Hilton et al. 2021 (arXiv 2110.00641); AReaL (arXiv 2505.24298). Without a forward pass of the
proximal policy: A-3PO (arXiv 2512.06547).
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from learner.config.option_types import Positive
from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.losses.ppo import ppo


def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cap: Positive | None = 5.0,
    proximal: Literal["recompute", "detach", "loglinear", "linear"] = "recompute",
    fresh: Literal["current", "behavior"] = "current",
) -> TokenLoss:
    """ℓ_t = sg(w) · max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)).

    r = current / proximal, w = min(proximal / behaviour, cap). w is part of the loss, so a
    correction that weighs would count it twice. By `proximal`:

        recompute   the proximal policy is `proximal_logprobs`
        detach      it is the current one, detached: r = 1; exact for one optimizer step per batch
        loglinear   log proximal = log behaviour + a·(log current − log behaviour), a = 1 − 1/lag
        linear      proximal = (1 − a)·behaviour + a·current

    For tokens without lag loglinear and linear take the policy `fresh`: "current", so that w
    carries the mismatch between engine and trainer, or "behavior" (AReaL), so that r does.

    Stats of `ppo`, and tokens whose w was cut: `weight_capped`.
    """
    cap = torch.inf if cap is None else cap
    inputs = replace(inputs, proximal_logprobs=_proximal(inputs, proximal, fresh))
    surrogate = ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight = inputs.behavior_log_ratio.exp()
    stats = {**surrogate.stats, "weight_capped": (weight > cap).sum()}
    return TokenLoss(weight.clamp(max=cap) * surrogate.per_token, stats)


def _proximal(inputs: LossInputs, source: str, fresh: str) -> Tensor:
    """Return the log-probabilities of the proximal policy, [N], detached."""
    what = f"decoupled_ppo with proximal = {source!r}"
    current, behavior = inputs.logprobs.detach(), inputs.behavior_logprobs.detach()
    if source == "recompute":
        recomputed: Tensor = inputs.require(what, "proximal_logprobs")
        return recomputed
    if source == "detach":
        return current
    lags = inputs.lags(what)
    share = 1 - 1 / lags.clamp(min=1).to(current.dtype)
    if source == "loglinear":
        between = behavior + share * (current - behavior)
    else:
        between = torch.logaddexp(torch.log1p(-share) + behavior, share.log() + current)
    return torch.where(lags > 0, between, current if fresh == "current" else behavior)
