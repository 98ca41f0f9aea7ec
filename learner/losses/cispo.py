"""CISPO: a capped, detached importance weight on REINFORCE, so no token loses its gradient.

MiniMax-M1 (arXiv 2506.13585, eq. 4-5); with an absolute cap as in ScaleRL (arXiv 2510.13786).
"""

from learner.errors import InputError
from learner.losses.catalogue import policy_loss_function
from learner.losses.inputs import LossInputs, TokenLoss


@policy_loss_function("cispo", owns_is=True)
def cispo(inputs: LossInputs, *, cap_low: float = 0.0, cap_high: float = 5.0) -> TokenLoss:
    """ℓ_t = −sg(clip(r, cap_low, cap_high)) · A · log π(y_t), r = current / anchor.

    Args:
        inputs: One packed row.
        cap_low: Smallest weight, absolute.
        cap_high: Largest weight, absolute.

    Returns:
        Stats count tokens: `capped`, whatever the sign of their advantage.

    Raises:
        InputError: Bounds out of order.
    """
    if not 0 <= cap_low < cap_high:
        raise InputError(f"cispo needs 0 <= cap_low < cap_high, found {cap_low} and {cap_high}")
    ratio = inputs.log_ratio.detach().exp()
    capped = inputs.trained & ((ratio < cap_low) | (ratio > cap_high))
    per_token = -ratio.clamp(cap_low, cap_high) * inputs.advantages * inputs.current
    return TokenLoss(per_token, {"capped": capped.sum()})
