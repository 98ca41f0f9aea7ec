"""Weights under the names and shapes of a model folder, which engines load.

transformers holds some tensors otherwise than a folder does: the experts of a layer as one, a
matrix of the folder as several, or under another name. Its own conversion is reversed here, for as
few tensors at a time as belong together.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from headway.errors import InputError, first_line
from learner.model import lora
from learner.model.shared_weights import shape_of


class HuggingFaceNames:
    """Translation of the tensors of a whole transformers model to those of its folder."""

    def __init__(self, model: Any) -> None:
        """Find which tensors are converted, and together with which.

        Raises:
            InputError: The model's folder cannot be written from its tensors.
        """
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        adapted = {name for name, (_, *factors), _ in lora.weights(model) if factors}
        whole = [(weight.name, weight.parameters[0]) for weight in lora.weights(model)]
        blanks = {
            name: torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in (*whole, *saved_buffers(model))
        }
        try:
            self._renamed, self._together = _conversions(model, blanks)
            written = revert_weight_conversion(model, blanks)
            differing = _shapes(written.items()) ^ _shapes(self.of(blanks.items()))
            problem = ", ".join(sorted(name for name, _ in differing)[:3])
        except Exception as error:  # noqa: BLE001  (an operation raises whatever its author chose)
            problem = first_line(error)
        if problem:
            raise InputError(
                f"the weights of {model.name_or_path!r} cannot be written as its folder has them, "
                f"for transformers does not undo how it loads a {type(model).__name__}: {problem}"
            )
        self.converts_adapted = not adapted.isdisjoint({*self._renamed, *self._together})
        """True if a weight with factors is one of them, so that engines cannot merge these."""

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights in the folder's form, in order, each valid until the next.

        Tensors that make one of the folder are copied until the last of them has come.
        """
        waiting: dict[frozenset[str], dict[str, Tensor]] = {}
        for name, tensor in weights:
            if (names := self._together.get(name)) is None:
                yield self._renamed.get(name, name), tensor
                continue
            group = waiting.setdefault(names, {})
            if len(group) + 1 < len(names):
                group[name] = tensor.clone()
            else:
                yield from self._revert(self._model, {**waiting.pop(names), name: tensor}).items()


def saved_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a model folder has, by their names in the model."""
    saved = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> set[tuple[str, torch.Size]]:
    return {(name, tensor.shape) for name, tensor in tensors}


def _conversions(
    model: Any, names: Iterable[str]
) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """Return the new names of tensors that are renamed, and with which others each is converted."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # it was not loaded from a folder
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in known if not isinstance(one, PrefixChange)]
    undone = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [one for one in undone if isinstance(one, WeightRenaming)]
    converters = [one for one in undone if not isinstance(one, WeightRenaming)]
    renamed, groups = dict[str, str](), dict[str, set[str]]()
    for name in sorted(names, key=dot_natural_key):
        new, converted = rename_source_key(name, renamings, converters, reverse=True)
        if converted is not None:
            groups.setdefault(new, set()).add(name)
        elif new != name:
            renamed[name] = new
    return renamed, {name: frozenset(group) for group in groups.values() for name in group}
