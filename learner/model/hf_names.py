"""Weights under the names and shapes of a model folder, which engines load.

transformers holds some tensors otherwise than a folder does: the experts of a layer as one, a
matrix of the folder as several, or under another name. Its own conversion is reversed here, for as
few tensors at a time as belong together.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headway.errors import InputError, first_line
from learner.model import lora
from learner.model.shared_weights import shape_of
from weight_sync.base_model import folder_of


class HuggingFaceNames:
    """Translation of the tensors of a whole transformers model to those of its folder."""

    def __init__(self, model: Any) -> None:
        """Find which tensors are converted, and together with which.

        Raises:
            InputError: The model's folder cannot be written from its tensors.
        """
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        self._saved = set(model.state_dict())
        """Names of buffers that the folder has, among others."""
        adapted = {name for name, (_, *factors), _ in lora.weights(model) if factors}
        whole = [(weight.name, weight.parameters[0]) for weight in lora.weights(model)]
        blanks = {
            name: torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in (*whole, *self._buffers())
        }
        try:
            self._renamed, self._together = _conversions(model, blanks)
            written = revert_weight_conversion(model, blanks)
            differing = _shapes(written.items()) ^ _shapes(self._converted(blanks.items()))
            problem = ", ".join(sorted(name for name, _ in differing)[:3])
        except Exception as error:  # noqa: BLE001  (an operation raises whatever its author chose)
            problem = first_line(error)
        if problem:
            raise InputError(
                f"the weights of {model.name_or_path!r} cannot be written as its folder has them, "
                f"for transformers does not undo how it loads a {type(model).__name__}: {problem}"
            )
        stored = stored_weights(model)
        for name in blanks.keys() - stored.keys():  # some folders begin at the base model
            short = name.removeprefix(f"{model.base_model_prefix}.")
            self._renamed |= {name: short} if short in stored else {}
        if stored:  # further buffers follow from the configuration
            self._saved = {name for name in blanks if self._renamed.get(name, name) in stored}
        self.converts_adapted = not adapted.isdisjoint({*self._renamed, *self._together})
        """True if a weight with factors is one of them, so that engines cannot merge these."""

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights in the folder's form, in order, each valid until the next; then buffers.

        Those are the model's own. Tensors that make one of the folder are copied until the last of
        them has come.
        """
        return self._converted(chain(weights, self._buffers()))

    def _converted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[frozenset[str], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            if (names := self._together.get(name)) is None:
                yield self._renamed.get(name, name), tensor
                continue
            group = waiting.setdefault(names, {})
            if len(group) + 1 < len(names):
                group[name] = tensor.clone()
            else:
                yield from self._revert(self._model, {**waiting.pop(names), name: tensor}).items()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, it) for name, it in self._model.named_buffers() if name in self._saved)


def stored_weights(model: Any) -> dict[str, Any]:
    """Return the open files of a model's folder, by the names of the tensors in them."""
    folder = folder_of(model.name_or_path) if model.name_or_path else None
    files = folder.glob("*.safetensors") if folder else ()
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


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
