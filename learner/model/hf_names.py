"""Weights as a model folder has them, where transformers holds them otherwise while it computes.

Experts of a layer are one tensor in memory, and one each in the folder, which is what engines load.
Leaves out all other tensors: they pass unchanged.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class HuggingFaceNames:
    """What a model's tensors are called and shaped like in its folder.

    Args:
        model: Transformers' model, whole: before its parameters are divided among ranks.
    """

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        self._other: set[str] = set()
        for name, parameter in model.named_parameters():
            blank = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            if list(revert_weight_conversion(model, {name: blank})) != [name]:
                self._other.add(name)

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights in the folder's form; in order, each valid until the next is asked."""
        for name, tensor in weights:
            if name in self._other:
                yield from self._revert(self._model, {name: tensor}).items()
            else:
                yield name, tensor
