"""Policy losses: one idea a file, found by name.

`loss_inputs` has what each is given and returns; none reduces over tokens
(`learner.batch.token_weights`).
"""

from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.losses.registry import LOSSES, PolicyLoss, policy_loss, policy_loss_function
from learner.registry import import_modules

__all__ = [
    "LOSSES",
    "LossInputs",
    "PolicyLoss",
    "TokenLoss",
    "policy_loss",
    "policy_loss_function",
]

import_modules(__name__, __path__)
