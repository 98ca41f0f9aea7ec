"""A model with one layer of each kind in float32, and the same one as its folder describes it.

Faults of a loaded model, such as a scale of attention or a window that one of its layers lacks, are
in whatever is computed with it. So it is compared with a model that is built anew from the folder's
configuration and shares nothing with it but weights.
"""

import copy
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from learner.model import lora
from learner.model.rope import pin_rope
from learner.model.shared_weights import shape_of
from learner.model.ways import SequenceModel

Module = TypeVar("Module", bound=SequenceModel)
Gathered = Callable[[list[nn.Parameter]], AbstractContextManager[object]]
"""Returns a context in which parameters are whole."""

PLACE = re.compile("idx|index|layer_(id|num)")
"""Parts of the names of attributes that say which layer of its model one is."""

MOST_MADE_UP = 2**30
"""Most numbers of random weights, for a model without data."""

PLAIN = (int, float, str, tuple, list, torch.dtype, type(None))
"""Types of the attributes that tell kinds of layers apart."""


class OtherLayers(Exception):
    """A model has other layers or weights than its folder describes."""


def few_layers(
    module: Module, gathered: Gathered | None = None, *, every: bool = False
) -> tuple[Module, Module]:
    """Return copies in float32 with one layer of each kind: of the module, and built anew.

    They share their weights. Layers are of one kind if they and their parts have the same classes,
    attributes and shapes, and would have by the folder's configuration. Copies have `every` layer
    where these need others, as those that share keys and values do.

    Raises:
        OtherLayers: The module has other weights than its folder describes.
        MemoryError: It is without data, and the copies would be too large.
    """
    model, anew = module.model, _built_anew(module.model)
    chosen = _first_of_each_kind(model, anew)
    if every:
        chosen = {length: list(range(length)) for length in chosen}
    _cut(anew, chosen)
    whole = _cut(model, chosen)
    try:
        _check_size(module)
        weights: dict[int, Any] = {}
        for parameter in module.parameters():
            with gathered([parameter]) if gathered else nullcontext():
                weights[id(parameter)] = nn.Parameter(_values(parameter), requires_grad=False)
        copied = copy.deepcopy(module, weights)
    finally:
        for stack, layers in whole:
            stack._modules = layers
    for layer in copied.modules():  # which were compiled for the layers that they were copied of
        if hasattr(vars(layer).get("forward"), "_torchdynamo_orig_callable"):
            del layer.forward
    for each in (copied.model, anew):
        _shorten(each, chosen)
    if model.device.type == "meta":
        _make_buffers(copied.model)
        pin_rope(copied.model, model.name_or_path, module.context)
    _make_buffers(anew)
    _fill(anew, copied.model)
    pin_rope(anew, model.name_or_path, module.context)
    described = copy.copy(copied)
    described._modules = {**copied._modules, "model": anew}
    copied, described = copied.float(), described.float()
    try:
        described.own(torch.arange(3, 8, device=copied.model.device))
    except Exception:  # models raise anything
        if every:
            raise
        return few_layers(module, gathered, every=True)
    return copied, described


def _check_size(module: SequenceModel) -> None:
    size = sum(parameter.numel() for parameter in module.parameters())
    if module.model.device.type == "meta" and size > MOST_MADE_UP:
        raise MemoryError(f"its layers of each kind have {size / 1e9:.1f} billion weights")


def _values(parameter: nn.Parameter) -> Tensor:
    """Return a weight in float32; where it has no data, random numbers of its shape."""
    if not parameter.is_meta:
        return parameter.detach().to(torch.float32, copy=True)
    if parameter.dim() == 1:
        return 1 + torch.randn(parameter.shape) / 8
    return torch.randn(parameter.shape) / math.sqrt(parameter.shape[-1])


def _built_anew(model: Any) -> Any:
    """Return a model without weights as the folder of another describes it."""
    from transformers import AutoConfig

    config = copy.deepcopy(model.config)
    if model.name_or_path:
        config = AutoConfig.from_pretrained(model.name_or_path)
        if not isinstance(config, type(model).config_class):
            config = config.get_text_config()
        config.num_labels = model.config.num_labels
    options = {"dtype": model.dtype, "attn_implementation": "eager"}
    with torch.device("meta"):
        return type(model)._from_config(config, **options).eval()


def _stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of layers of a model that are in no other list, by their names."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in stacks)
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or inner:
            continue
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            stacks[name] = module
    return stacks


def _first_of_each_kind(model: Any, anew: Any) -> dict[int, list[int]]:
    """Return the places of the first layers of each kind, by the length of the lists of layers."""
    stacks, described = _stacks(model), _stacks(anew)
    lengths, expected = ({name: len(each[name]) for name in each} for each in (stacks, described))
    if lengths != expected:
        raise OtherLayers(f"it has lists of {lengths} layers, and its folder {expected}")
    settings = [vars(config) for each in (model, anew) for config in _configs(each)]
    chosen: dict[int, list[int]] = {}
    for length in set(lengths.values()):
        alike = [name for name in lengths if lengths[name] == length]
        by_place = [
            values
            for setting in settings
            for values in setting.values()
            if isinstance(values, list | tuple) and len(values) == length
        ]
        kinds: dict[Any, int] = {}
        for place in range(length):
            layers = [each[name][place] for name in alike for each in (stacks, described)]
            kind = [*map(_kind, layers), [values[place] for values in by_place]]
            kinds.setdefault(repr(kind), place)
        chosen[length] = sorted(kinds.values())
    return chosen


def _configs(model: Any) -> list[Any]:
    """Return the configurations that a model and its parts have, each once."""
    text = model.config.get_text_config()
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list({**found, id(text): text}.values())


def _kind(layer: nn.Module) -> list[Any]:
    """Return what tells a layer from others of its model, but for weights."""
    kind: list[Any] = []
    for name, module in layer.named_modules():
        kind += [name, type(module)]
        for key, value in vars(module).items():
            if isinstance(value, PLAIN) and not PLACE.search(key):
                kind += [key, value]
            elif callable(value):
                kind += [key, getattr(value, "__qualname__", type(value))]
            elif key == "config":
                kind.append(id(value))
        kind += [(key, shape_of(p)) for key, p in module._parameters.items() if p is not None]
        kind += [len(module._forward_hooks), len(module._forward_pre_hooks)]
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers[key]
            if buffer is not None and not buffer.is_meta:
                kind.append(float(buffer.double().sum()))
    return kind


def _cut(model: Any, chosen: dict[int, list[int]]) -> list[tuple[nn.ModuleList, Any]]:
    """Leave only the chosen layers in a model; return its lists, and what they had."""
    whole = [(stack, stack._modules) for stack in _stacks(model).values()]
    for stack, layers in whole:
        places = chosen[len(layers)]
        stack._modules = {str(i): layers[str(place)] for i, place in enumerate(places)}
    return whole


def _shorten(model: Any, chosen: dict[int, list[int]]) -> None:
    """Leave only the chosen layers in the configurations of a model."""
    for config in _configs(model):
        for name, value in vars(config).items():
            if isinstance(value, list | tuple) and len(value) in chosen:
                vars(config)[name] = type(value)(value[i] for i in chosen[len(value)])
        name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        if (length := getattr(config, name, None)) in chosen:
            vars(config)[name] = len(chosen[length])


def _make_buffers(model: Any) -> None:
    """Make the buffers of a model without data as transformers does, which loads in float32."""
    for module in model.modules():
        module._is_hf_initialized = False
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if model.name_or_path else model.dtype)
    try:
        model.initialize_weights()
    finally:
        torch.set_default_dtype(before)


def _fill(anew: Any, model: Any) -> None:
    """Give a model without weights those of another, and its buffers that are saved."""
    weights = {weight.name: weight.parameters[0] for weight in lora.weights(model)}
    wanted = dict(anew.named_parameters(remove_duplicate=False))
    shared = {id(wanted[name]): weights[name] for name in weights.keys() & wanted.keys()}
    different = {name for name in wanted if id(wanted[name]) not in shared}
    if different := different | (weights.keys() - wanted.keys()):
        raise OtherLayers(f"its folder describes other weights: {', '.join(sorted(different)[:3])}")
    for name, parameter in wanted.items():
        owner, _, key = name.rpartition(".")
        tensor = weights.get(name, shared[id(parameter)])
        anew.get_submodule(owner)._parameters[key] = tensor
    anew.to(model.device)
    saved = model.state_dict()
    for name, buffer in anew.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])
