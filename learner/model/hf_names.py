"""Weights under the names and shapes of a model folder, which engines load.

transformers holds the experts of a layer as one tensor in memory, and the folder has one for each.
All other tensors pass unchanged.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from learner.model import lora
from learner.model.shared_weights import shape_of


class HuggingFaceNames:
    """Translation of the tensors of a whole transformers model to those of its folder."""

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        self._converted: set[str] = set()
        self.converts_adapted = False
        """True if a weight with factors is one of them, so that engines cannot merge these."""
        for name, (parameter, *factors), _ in lora.weights(model):
            blank = torch.empty(shape_of(parameter), dtype=parameter.dtype, device="meta")
            if list(revert_weight_conversion(model, {name: blank})) != [name]:
                self._converted.add(name)
                self.converts_adapted |= bool(factors)

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights in the folder's form, in order, each valid until the next."""
        for name, tensor in weights:
            if name in self._converted:
                yield from self._revert(self._model, {name: tensor}).items()
            else:
                yield name, tensor
