"""Policy losses: one idea a file, found by name.

`inputs` says what each is given and returns; none reduces over tokens
(`learner.batch.token_weights`).
"""

from learner.losses import (
    cispo,
    dapo,
    decoupled_ppo,
    dpo,
    gspo,
    kimi,
    ppo,
    raft,
    reinforce,
    sapo,
    topr,
)
from learner.losses.loss_inputs import LossInputs, TokenLoss
from learner.losses.registry import LOSSES, PolicyLoss, policy_loss, policy_loss_function

__all__ = [
    "LOSSES",
    "LossInputs",
    "PolicyLoss",
    "TokenLoss",
    "cispo",
    "dapo",
    "decoupled_ppo",
    "dpo",
    "gspo",
    "kimi",
    "policy_loss",
    "policy_loss_function",
    "ppo",
    "raft",
    "reinforce",
    "sapo",
    "topr",
]
