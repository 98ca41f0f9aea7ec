"""Rotary positions that do not depend on the other sequences of a row.

With longrope transformers takes its factors by the largest position of a row, so that a sequence is
computed otherwise beside a longer one. vLLM takes the long factors for every sequence if its
context is longer than the one of the first training, and the short ones otherwise.
"""

import math
from typing import Any

from headway.errors import InputError

PINNED = "pinned"
"""Type of rope whose frequencies transformers does not change."""


GROWING = "dynamic", "longrope"
"""Types of rope that transformers computes by the largest position of a row."""


def pin_rope(model: Any, path: str, context: int | None) -> None:
    """Have a model take longrope's factors as vLLM does with `context` as its `max_model_len`.

    A model without longrope is left as it is; so is any if there is no engine (None). Models whose
    layers have several kinds of rope have one by the type of layer.

    Raises:
        InputError: vLLM computes positions otherwise. Its dynamic rope (NTK) does not grow with a
            sequence as that of transformers does, so `context` must be within the positions of the
            model; and it scales longrope by the positions of the model alone.
    """
    if context is None:
        return
    for module, layers, kind in _kinds(model):
        if kind == "dynamic":
            _check_dynamic(module, path, context)
        elif kind == "longrope":
            _pin_longrope(module, layers, path, context)


def grows(model: Any) -> bool:
    """Return True if positions of a sequence may depend on longer ones beside it."""
    return any(kind in GROWING for _, _, kind in _kinds(model))


def _kinds(model: Any) -> list[tuple[Any, str | None, Any]]:
    """Return modules with a rope, the type of layers that it is of, if of one, and its type."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            found.append((module, layers, kind))
    return found


def _check_dynamic(module: Any, path: str, context: int) -> None:
    positions = module.config.max_position_embeddings
    if context > positions:
        raise InputError(
            f"the rope of {path!r} is dynamic and the engines' context (actors.max_model_len) "
            f"{context} tokens, which must be at most its max_position_embeddings = {positions}: "
            "beyond that vLLM and transformers compute positions differently"
        )


def _pin_longrope(module: Any, layers: str | None, path: str, context: int) -> None:
    """Pin the factors of all layers, or of those of the type `layers`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, prefix = module.config, "" if layers is None else f"{layers}_"
    options = {} if layers is None else {"layer_type": layers}
    device = getattr(module, f"{prefix}inv_freq").device
    factors, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=context, **options)
    rope = config.rope_parameters if layers is None else config.rope_parameters[layers]
    original = rope["original_max_position_embeddings"]
    growth = max(1.0, config.max_position_embeddings / original)
    expected = math.sqrt(1 + math.log(growth) / math.log(original))
    if not math.isclose(scaling, expected, rel_tol=1e-6):
        raise InputError(
            f"the longrope of {path!r} is scaled by {scaling:.6g}, by attention_factor or factor "
            f"in its config.json, and vLLM scales it by {expected:.6g}, which follows from its "
            f"{config.max_position_embeddings} positions and the {original} before"
        )
    setattr(module, f"{prefix}inv_freq", factors)
    if layers is None:  # neither value has transformers choose again
        module.rope_type = PINNED
    else:
        module.rope_type[layers] = PINNED
