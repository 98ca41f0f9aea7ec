"""Policy losses: one idea a file, found by name; none reduces over tokens."""

from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.losses.registry import LOSSES, PolicyLoss, policy_loss, policy_loss_function
from learner.registry import import_modules

__all__ = ["LOSSES", "LossInputs", "PolicyLoss", "TokenLoss", "policy_loss", "policy_loss_function"]

import_modules(__name__, __path__)
