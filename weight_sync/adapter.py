"""Factors of adapters (LoRA): names, and merging into the weights of a model folder.

A layer's factors A [r, in] and B [out, r] change its weight W [out, in] to W + scale · B A. They
have the names that PEFT gives them. Imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from weight_sync.errors import LoadFailed, ManifestError

if TYPE_CHECKING:
    from torch import Tensor

KEPT = "e_score_correction_bias"
"""End of the names of weights that transformers, and so the learner, keeps as the folder has them,
mostly in float32, whatever the dtype of the model: routers choose experts by them."""
PREFIX, A, B, WEIGHT = "base_model.model.", ".lora_A.weight", ".lora_B.weight", ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterForm:
    """The base and the scale by which published factors are merged."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    scale: float
    """Factor of B A."""
    base: str = ""
    """Fingerprint of the weights that they change (`weight_sync.base_model`), "" if not known."""


def factor_name(weight: str, kind: str) -> str:
    """Return the name of the factor A or B (`kind`) of a weight of the model folder.

    Example:
        >>> factor_name("model.layers.0.mlp.up_proj.weight", A)
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{PREFIX}{weight.removesuffix(WEIGHT)}{kind}"


def weight_name(factor: str) -> str:
    """Return the name of the weight that a factor changes."""
    return factor.removeprefix(PREFIX).removesuffix(A).removesuffix(B) + WEIGHT


def changed_shapes(factors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights that factors of these shapes change, by name.

    Raises ManifestError if a tensor is not one of a pair A [r, in] and B [out, r].
    """
    shapes = {}
    for name, shape in factors.items():
        weight = weight_name(name)
        a, b = (factors.get(factor_name(weight, kind), ()) for kind in (A, B))
        if shape not in (a, b) or len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise ManifestError(
                f"tensor {name!r} of shape {shape} is no factor of an adapter: expected A [r, in] "
                f"and B [out, r] of a weight, found {[a, b]}"
            )
        shapes[weight] = b[0], a[1]
    return shapes


def touched(factors: Iterable[str]) -> Callable[[tuple[str, "Tensor"]], bool]:
    """Return a predicate of weights of a model folder: an engine's layer of them has factors.

    Engines fuse layers of one module, such as its projections of queries, keys and values: weights
    and biases of all layers of a module belong together.
    """
    modules = {weight_name(name).rsplit(".", 2)[0] for name in factors}
    return lambda weight: weight[0].rsplit(".", 2)[0] in modules


def merge(weight: "Tensor", a: "Tensor", b: "Tensor", scale: float) -> "Tensor":
    """Return weight + scale · b a, summed in float32 and rounded once to the weight's dtype."""
    return weight.float().addmm(b.float(), a.float(), alpha=scale).to(weight.dtype)


def merged(
    base: Iterable[tuple[str, "Tensor"]], factors: Mapping[str, "Tensor"], scale: float
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the weights of a model folder with an adapter merged in.

    All but `KEPT` ones have the dtype of the factors, in which the learner has them too: the result
    is bit for bit what it would have merged. Raises LoadFailed if factors have no weight.
    """
    unused = dict(factors)
    dtype = next(iter(unused.values())).dtype
    for name, weight in base:
        cast = weight.is_floating_point() and not name.endswith(KEPT)
        plain = weight.to(dtype) if cast else weight
        a, b = (unused.pop(factor_name(name, kind), None) for kind in (A, B))
        yield name, plain if a is None or b is None else merge(plain, a, b, scale)
    if unused:
        raise LoadFailed(
            f"the engine's model folder has no weights for {len(unused)} factors of the adapter "
            f"({', '.join(sorted(unused)[:3])})"
        )
