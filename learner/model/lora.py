"""Adapters (LoRA): frozen linear layers W and trained factors, W + scale · B A.

Hu et al. (2021, arXiv 2106.09685); the scale of `rslora` is Kalajdzievski's (2023, arXiv
2312.03732). The only file that imports peft, which puts a layer of its own around each linear one.
Weights keep the names here that they have without an adapter.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.errors import InputError
from learner.config.lora import WEIGHTS_FILE, LoraConfig, adapted_layers, check_form, stored_form
from weight_sync.adapter import PREFIX, A, B, factor_name, merge
from weight_sync.base_model import fingerprint_of_weights

log = logging.getLogger(__name__)

ADAPTER = "default"
"""PEFT's name of a model's only adapter."""
HEAD = "score"
"""The head of a critic or reward model, which is trained beside its adapter."""
FINGERPRINT = "base_fingerprint"
"""Attribute of an adapted model, and key in an adapter's file: the weights that it changes."""
EXACT = "headway_exact"
"""Attribute of a factor or head that was rounded to the model's dtype: its values before that."""
SAMPLED_LAYERS, SAMPLED_ROWS = 16, 64
"""Where `lost_to_rounding` looks."""


class Weight(NamedTuple):
    """A tensor of a model, and what it is made of."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    """The tensor itself; of an adapted layer its factors A [r, in] and B [out, r] too."""
    scale: float = 0.0

    def value(self) -> Tensor:
        """Return the tensor, with its factors merged in; else a view."""
        if len(self.parameters) == 1:
            return self.parameters[0].detach()
        weight, a, b = (parameter.detach() for parameter in self.parameters)
        return merge(weight, a, b, self.scale)


class Adapter(NamedTuple):
    """An adapter as a folder has it."""

    config: LoraConfig
    """Its form; `path` is the folder."""
    base: str
    """Folder or hub name of the model that it was trained on."""
    fingerprint: str
    """Fingerprint of that model's weights (`weight_sync.base_model`); "" if not known."""
    tensors: dict[str, Tensor]  # factors by PEFT's names


def add_adapter(
    model: Any, config: LoraConfig, *, seed: int, section: str = "learner.lora"
) -> None:
    """Freeze a transformers model but for a `HEAD`, and add factors to its linear layers.

    Its outputs stay the same, bit for bit, unless there is an adapter to begin with. `section` is
    the one of the recipe, for error messages.

    Raises:
        InputError: It has no such layers, or the adapter to begin with does not fit.
    """
    import peft

    inside = set(model.base_model.modules())
    modules = {name: layer for name, layer in model.named_modules() if layer in inside}
    layers = adapted_layers(
        config,
        model=model.name_or_path,
        linear={name for name, layer in modules.items() if isinstance(layer, nn.Linear)},
        section=section,
    )
    ends = {name.split(".")[-1] for name in layers}  # short, where these name the same ones
    same = layers == {name for name, _ in model.named_modules() if name.split(".")[-1] in ends}
    head = getattr(model, HEAD, None)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=sorted(ends if same else layers),
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    setattr(model, FINGERPRINT, fingerprint_of_weights(model.name_or_path))
    if head is not None:
        settings.modules_to_save = [HEAD]
        head.weight.requires_grad_(True)
    for factor in factors(model):
        (parameter,) = factor.parameters
        parameter.data = parameter.data.to(model.dtype)
    if config.path is not None:
        _begin_with(model, config, Path(config.path), section)


def _begin_with(model: Any, config: LoraConfig, folder: Path, section: str) -> None:
    """Replace the factors by those of an adapter folder."""
    stored = read_adapter(folder)
    check_base(stored, model)
    check_form(stored.config, config, section)
    parameters = {name: parameter for name, (parameter,), _ in trained(model)}
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        others = sorted(shapes.keys() ^ parameters.keys()) or sorted(parameters)
        raise InputError(
            f"{section}.path = {str(folder)!r} has other tensors than its targets and rank make of "
            f"{model.name_or_path!r}: {', '.join(others[:3])}"
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(stored.tensors[name])
        if stored.tensors[name].dtype != parameter.dtype:
            setattr(parameter, EXACT, stored.tensors[name])


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter folder, as PEFT writes it.

    Raises:
        InputError: A file is missing or damaged, or it is another form of adapter.
    """
    config, base = stored_form(folder)
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            fingerprint = (file.metadata() or {}).get(FINGERPRINT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    return Adapter(config, base, fingerprint or fingerprint_of_weights(base), tensors)


def base_of(model: Any) -> str:
    """Return the fingerprint of the weights that a model's adapter changes; "" if not known."""
    return str(getattr(model, FINGERPRINT, ""))


def check_base(adapter: Adapter, model: Any) -> None:
    """Compare the weights that an adapter was trained on with those of a model.

    Where they are not known and it has another name, that is logged.

    Raises:
        InputError: They differ.
    """
    own, folder = base_of(model), adapter.config.path
    if own and adapter.fingerprint and own != adapter.fingerprint:
        raise InputError(
            f"the adapter {folder!r} was trained on other weights than those of "
            f"{model.name_or_path!r}: on {adapter.base!r} ({adapter.fingerprint} there, {own} here)"
        )
    if not (own and adapter.fingerprint) and adapter.base != model.name_or_path:
        log.warning(
            "the adapter %r was trained on %r, which is not compared with %r",
            folder, adapter.base, model.name_or_path,
        )  # fmt: skip


def write_adapter(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter folder that PEFT loads; `tensors` are those that `trained` names."""
    model.peft_config[ADAPTER].save_pretrained(folder)
    written = {"format": "pt", FINGERPRINT: base_of(model)}
    save_file(tensors, folder / WEIGHTS_FILE, written)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with factors, and their names."""
    return ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A"))


def factors(model: nn.Module) -> Iterator[Weight]:
    """Yield the factors of an adapter by PEFT's names; none where there is no adapter."""
    for name, layer in _adapted(model):
        yield Weight(factor_name(name, A), (layer.lora_A[ADAPTER].weight,))
        yield Weight(factor_name(name, B), (layer.lora_B[ADAPTER].weight,))


def trained(model: nn.Module) -> Iterator[Weight]:
    """Yield the factors of an adapter and a `HEAD` beside them by PEFT's names."""
    yield from factors(model)
    if (head := getattr(model, HEAD, None)) is not None:
        yield Weight(f"{PREFIX}{HEAD}.weight", (head.weight,))


def weights(model: nn.Module) -> Iterator[Weight]:
    """Yield the tensors of a model as if it had no adapter, in the order of its parameters."""
    added = {id(parameter) for factor in factors(model) for parameter in factor.parameters}
    layers = {id(layer.base_layer.weight): layer for _, layer in _adapted(model)}
    for name, parameter in model.named_parameters():
        plain, layer = name.replace(".base_layer.", "."), layers.get(id(parameter))
        if layer is not None:
            own = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            yield Weight(plain, (parameter, *own), layer.scaling[ADAPTER])
        elif id(parameter) not in added:
            yield Weight(plain, (parameter,))


@torch.no_grad()
def lost_to_rounding(
    model: nn.Module, gathered: Callable[[list[nn.Parameter]], AbstractContextManager[object]]
) -> float | None:
    """Return ‖(merged − W) − ΔW‖ / ‖ΔW‖, ΔW = scale · B A: what bfloat16 loses of the changes.

    W is the weight in bfloat16, as engines and folders have it, and so is what it is merged to.
    It is near 1 where changes are too small for the dtype to hold, and None where there are none.
    Norms are over up to `SAMPLED_ROWS` rows of up to `SAMPLED_LAYERS` layers, drawn at random but
    alike in every call and rank. `gathered` returns a context in which parameters are whole.
    """
    layers = [weight for weight in weights(model) if weight.scale]
    sample = random.Random(0).sample(layers, min(SAMPLED_LAYERS, len(layers)))
    lost = change = 0.0
    for _, parameters, scale in sample:
        with gathered(list(parameters)):
            weight, a, b = (parameter.detach() for parameter in parameters)
            weight, b = weight[:SAMPLED_ROWS], b[:SAMPLED_ROWS]
            exact = scale * (b.float() @ a.float())
            merged = merge(weight, a, b, scale).bfloat16().float() - weight.bfloat16().float()
            lost += float((merged - exact).square().sum())
            change += float(exact.square().sum())
    return math.sqrt(lost / change) if change else None


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Compute without the adapter for a while.

    Its layers still run, with a scale of 0, since ZeRO 3 fetches weights in the order of a pass.
    """
    scales = [(layer.scaling, layer.scaling[ADAPTER]) for _, layer in _adapted(model)]
    for scaling, _ in scales:
        scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for scaling, scale in scales:
            scaling[ADAPTER] = scale
