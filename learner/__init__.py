"""The learner: advantages, policy losses, corrections, packing, and the processes that train.

The names below are the public interface. They are imported when first used, so that
`learner.config.learner` is read without loading torch.
"""

import importlib
from typing import Any

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
