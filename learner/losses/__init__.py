"""Policy losses: one idea a file, found by name; none reduces over tokens."""

from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.losses.policy_loss import policy_loss, policy_loss_function

__all__ = ["LossInputs", "TokenLoss", "policy_loss", "policy_loss_function"]
