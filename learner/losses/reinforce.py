"""REINFORCE (Williams 1992): the score function times the advantage, no ratio of its own."""

from learner.losses.loss_inputs import LossInputs, TokenLoss


def reinforce(inputs: LossInputs) -> TokenLoss:
    """ℓ_t = −A_t · log π(y_t). Stale tokens need a correction (`learner.corrections`)."""
    return TokenLoss(-inputs.gains * inputs.current, {})
