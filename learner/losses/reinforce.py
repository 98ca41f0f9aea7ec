"""REINFORCE (Williams 1992): the score function times the advantage, no ratio of its own."""

from learner.losses.catalogue import policy_loss_function
from learner.losses.inputs import LossInputs, TokenLoss


@policy_loss_function("reinforce", owns_is=False)
def reinforce(inputs: LossInputs) -> TokenLoss:
    """ℓ_t = −A_t · log π(y_t). Stale tokens need a correction (`learner.corrections`)."""
    return TokenLoss(-inputs.gains * inputs.current, {})
