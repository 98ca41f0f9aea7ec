"""The learner: advantages, policy losses, corrections, packing, and the processes that train.

The names below are the public interface. They are imported when first used, so that
`learner.config.learner` is read without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.advantages import Advantages as Advantages
    from learner.advantages import advantage as advantage
    from learner.advantages import compute_advantages as compute_advantages
    from learner.advantages.returns import gae as gae
    from learner.batch.packing import balance as balance
    from learner.batch.packing import pack as pack
    from learner.batch.token_weights import token_weights as token_weights
    from learner.corrections import Correction as Correction
    from learner.corrections import importance_weights as importance_weights
    from learner.diagnostics.off_policy import effective_sample_size as effective_sample_size
    from learner.losses import LossInputs as LossInputs
    from learner.losses import TokenLoss as TokenLoss
    from learner.losses import policy_loss as policy_loss
    from learner.losses import policy_loss_function as policy_loss_function
    from learner.losses.kl import kl_penalty as kl_penalty
    from learner.losses.value_loss import value_loss as value_loss

_NAMES = {
    "learner.advantages": ("Advantages", "advantage", "compute_advantages"),
    "learner.advantages.returns": ("gae",),
    "learner.batch.packing": ("balance", "pack"),
    "learner.batch.token_weights": ("token_weights",),
    "learner.corrections": ("Correction", "importance_weights"),
    "learner.diagnostics.off_policy": ("effective_sample_size",),
    "learner.losses": ("LossInputs", "TokenLoss", "policy_loss", "policy_loss_function"),
    "learner.losses.kl": ("kl_penalty",),
    "learner.losses.value_loss": ("value_loss",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
