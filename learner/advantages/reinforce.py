"""REINFORCE with a baseline over the whole batch, or a running one (Williams 1992)."""

from typing import Literal

from torch import Tensor

from learner.advantages.grouped import GroupedRewards


def reinforce(
    batch: GroupedRewards,
    *,
    baseline: Literal["mean", "leave_one_out", "ema"] = "mean",
    decay: float = 0.95,
) -> Tensor:
    """A_i = R_i − b; groups are ignored.

    mean           b = mean of the batch
    leave_one_out  b = mean of the other rollouts of the batch (unbiased)
    ema            b = bias-corrected exponential mean of the mean rewards of earlier batches, 0 in
                   the first; kept in `batch.state` as `ema` and `ema_weight`
                   (m ← d·m + (1 − d)·mean R, w ← d·w + (1 − d), b = m / w)
    """
    match baseline:
        case "mean":
            return batch.as_one_group().centred
        case "leave_one_out":
            return batch.as_one_group().leave_one_out
        case "ema":
            return batch.rewards - _advance(batch, decay)


def _advance(batch: GroupedRewards, decay: float) -> float:
    """Return the baseline before this batch, and add the batch to the running mean."""
    total, weight = batch.state.get("ema", 0.0), batch.state.get("ema_weight", 0.0)
    if batch.rewards.numel():
        batch.state["ema"] = decay * total + (1 - decay) * float(batch.rewards.mean())
        batch.state["ema_weight"] = decay * weight + (1 - decay)
    return total / weight if weight else 0.0
