"""A second set of a model's weights, loaded while vLLM generates with the first.

    Shadow(model)  ─▶  load(tensors)    any thread: new tensors, packed as the kernels want them
                   ─▶  exchange()       engine paused: references are swapped, nothing is copied

A shadow has layers of its own that share everything with the model's but their tensors. It is not
used for layers of unknown kinds. For a GPU its tensors are loaded into a `DeviceMemory`; `exchange`
copies them into the served ones, which keep their addresses. Written against vLLM 0.32.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize

from weight_sync.errors import LoadFailed
from weight_sync.vllm.device_memory import DeviceMemory

PACKED = "cpu_linear"
"""The attribute that vLLM's packing sets: the multiplication by the packed weight."""


def incomplete(layer: nn.Module) -> bool:
    """Return True if only a part of a projection was loaded; of embeddings a part is padding."""
    info = layerwise.get_layerwise_info(layer)
    linear = type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod
    return linear and 0 < info.load_numel < (info.load_numel_total or 0)


def applies(model: nn.Module) -> bool:
    """Return True if the weights of every layer can be exchanged."""
    return all(_known(layer) for layer in model.modules())


class Shadow:
    """A second copy of all weights of a model of vLLM for which `applies` is True."""

    def __init__(self, model: nn.Module, memory: DeviceMemory | None = None) -> None:
        self._memory = memory
        self._slots: dict[int, Tensor] = {}
        """Places in `memory`, by identity of the model's parameters."""
        self._targets: list[Tensor] = []
        self._staged: list[Tensor] = []
        self._names = {layer: name for name, layer in model.named_modules()}
        self._twins: dict[nn.Module, nn.Module] = {}
        self._root: Any = self._twin_of(model)
        self._loaded: list[tuple[nn.Module, nn.Module]] = []
        self._old: list[Any] = []

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], *, whole: bool = True) -> None:
        """Load and pack every layer, or only those that get tensors; the model does not change.

        Raises LoadFailed if a layer was not loaded whole or laid out in another way, and any error
        of vLLM's loaders.
        """
        with self._memory.filling() if self._memory else nullcontext():
            self._load(tensors, whole=whole)
        for twin in self._twins.values() if self._memory else ():
            twin._parameters.clear()

    def _load(self, tensors: Iterable[tuple[str, Tensor]], *, whole: bool) -> None:
        if self._memory is not None:
            live_ones = [p for live in self._twins for p in _parameters(live).values()]
            once = {id(parameter): parameter for parameter in live_ones}
            slots = self._memory.slots(list(once.values()))
            self._slots = dict(zip(once, slots, strict=True))
        for live, twin in self._twins.items():
            for name, parameter in _to_be_loaded(live).items():
                slot = self._slots.get(id(live._parameters.get(name)))
                twin._parameters[name] = _own(name, parameter, live, twin, slot)
            layerwise.initialize_online_processing(twin)
        self._root.load_weights(tensors)
        skipped = [self._names[live] for live, twin in self._twins.items() if incomplete(twin)]
        waiting = self._packed()
        new = {
            id(parameter): twin._parameters[name]
            for live, twin in self._loaded
            for name, parameter in _parameters(live).items()
        }
        for live, twin in waiting if whole else ():
            if any(id(parameter) not in new for parameter in _parameters(live).values()):
                skipped.append(self._names[live])
                continue
            for name, parameter in _parameters(live).items():  # tied: loaded as another layer's
                twin._parameters[name] = new[id(parameter)]
            method: Any = twin.quant_method
            method.process_weights_after_loading(twin)
            self._loaded.append((live, twin))
        if skipped:
            raise LoadFailed(
                f"not all weights for {len(skipped)} layers ({', '.join(skipped[:3])})"
            )
        for old, loaded in self._pairs() if self._memory else ():
            slot = self._slots[id(old)]
            if loaded.data_ptr() != slot.data_ptr():  # a bias, or laid out anew
                slot.copy_(loaded)
            self._targets.append(old.data)
            self._staged.append(slot)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor of the model, once, and the one that was loaded for it."""
        pairs = {}
        for live, twin in self._loaded:
            for name, old in _parameters(live).items():
                new = twin._parameters[name]
                if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise LoadFailed(f"{self._names[live]}.{name} is laid out in another way")
                pairs[id(old)] = old, new
        return list(pairs.values())

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the weights with the model's, or copy; `close` frees what is not needed then."""
        if self._memory is not None:
            self._memory.copy(self._targets, self._staged)
            return
        for live, twin in self._loaded:
            for name, parameter in _parameters(live).items():
                if parameter.numel():
                    self._old.append(parameter.data)
                    parameter.data = _parameters(twin)[name].data
            if PACKED in twin.__dict__:
                self._old.append(live.__dict__.get(PACKED))
                live.__dict__[PACKED] = twin.__dict__[PACKED]

    def close(self) -> None:
        """Free the weights that the model does not use; takes tenths of a second per gigabyte."""
        for twin in self._twins.values():  # vLLM's loaders and their layers refer to each other
            twin._parameters.clear()
            twin.__dict__.pop(PACKED, None)
            layerwise.get_layerwise_info(twin).reset()
        for tensors in (self._loaded, self._old, self._targets, self._staged):
            tensors.clear()

    def _twin_of(self, live: nn.Module) -> nn.Module:
        """Return the twin of a layer: tables of its own, no tensors, children twins as well."""
        if live not in self._twins:
            twin = object.__new__(type(live))
            twin.__dict__ = dict(live.__dict__, _parameters={}, _buffers={})
            twin.__dict__["_non_persistent_buffers_set"] = set()
            twin.__dict__.pop(PACKED, None)
            self._twins[live] = twin
            twin.__dict__["_modules"] = {
                name: None if child is None else self._twin_of(child)
                for name, child in live._modules.items()
            }
        return self._twins[live]

    def _packed(self) -> list[tuple[nn.Module, nn.Module]]:
        """Pack layers of which a part is padding; return those that should have got weights."""
        waiting = []
        for live, twin in self._twins.items():
            info = layerwise.get_layerwise_info(twin)
            if info.can_load() and info.load_numel:
                layerwise._layerwise_process(twin, info)
            if not info.can_load():
                self._loaded.append((live, twin))
            elif _parameters(live):
                waiting.append((live, twin))
        return waiting


def _known(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        weight = _to_be_loaded(layer).get("weight")
        kinds = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
        return type(method) in kinds and weight is not None and weight.ndim == 2
    return type(layer) is Attention or not hasattr(layer, "process_weights_after_loading")


def _parameters(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in layer._parameters.items() if value is not None}


def _to_be_loaded(layer: nn.Module) -> dict[str, Tensor]:
    """Return parameters in the form in which weights are loaded, before packing."""
    unpacked: dict[str, Tensor] = layerwise.get_layerwise_info(layer).restore_metadata[0]
    return _parameters(layer) | unpacked


def _own(
    name: str, parameter: Tensor, live: nn.Module, twin: nn.Module, slot: Tensor | None
) -> Any:
    """Create an empty parameter like another, with a loader bound to the twin and to a slot."""
    own: Any = meta.to_meta_tensor(parameter)
    loader = layerwise._get_original_loader(own)
    if isinstance(loader, MethodType) and loader.__self__ in (live, sanitize.layer_ref_sentinel):
        loader = MethodType(loader.__func__, twin)
    own.weight_loader = loader
    if name in meta.SKIP_TENSORS:  # vLLM fills these at once and counts the copies
        return meta.materialize_meta_tensor(own)
    if slot is not None and (slot.shape, slot.dtype) == (own.shape, own.dtype):
        own.weight_loader = _into(slot, loader)
    return own


def _into(slot: Tensor, loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that lets a parameter lie in a slot, once vLLM gives it memory."""

    @wraps(loader)
    def load(param: Tensor, *arguments: Any, **options: Any) -> Any:
        if not param.is_meta:
            param.data = slot
        return loader(param, *arguments, **options)

    return load
