"""Weights that ranks share, each holding a part of every tensor, as DeepSpeed's ZeRO 3 marks them.

A shared parameter is empty between uses. Its whole shape is in its attribute `ds_shape`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
"""The variable that has transformers read one weight at a time."""


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Return the whole shape of a parameter, shared or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_shared(module: nn.Module) -> bool:
    """Return True if ranks share any parameter of a module."""
    return any(hasattr(parameter, "ds_shape") for parameter in module.parameters())


@contextmanager
def each_loaded(take: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Have `take` called with each weight that transformers reads, before it reads the next.

    The order is that of the names, the same in every process. Weights that a model folder does not
    have, such as new heads, are not passed on.
    """

    def loaded(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        read = getattr(parameter, "_is_hf_initialized", False)
        if parameter is not None and read and not parameter.is_meta:
            take(parameter)

    hook = register_module_parameter_registration_hook(loaded)
    before = os.environ.get(ASYNC)
    os.environ[ASYNC] = "1"  # else threads read weights long before they are taken
    try:
        yield
    finally:
        hook.remove()
        os.environ.pop(ASYNC)
        if before is not None:
            os.environ[ASYNC] = before
