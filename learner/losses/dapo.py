"""DAPO's policy loss: PPO whose upper clip is wider, so that rare tokens can still grow.

Yu et al. 2025 (arXiv 2503.14476).
"""

from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.losses.ppo import ppo
from learner.losses.registry import built_in_loss


@built_in_loss("dapo")
def dapo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """`ppo` with clip-higher: the ratio is kept in [0.8, 1.28]."""
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
