"""Rotary positions that do not depend on the other sequences of a row.

With longrope transformers takes its factors by the largest position of a row, so that a sequence is
computed otherwise beside a longer one. vLLM takes the long factors for every sequence if its
context is longer than the one of the first training, and the short ones otherwise.
"""

from typing import Any

from learner.errors import InputError


def pin_rope(model: Any, path: str, context: int | None) -> None:
    """Have a model take longrope's factors as vLLM does with `context` as its `max_model_len`.

    A model without longrope is left as it is; so is any if there is no engine (None).

    Raises:
        InputError: Its rope is dynamic (NTK), and `context` is beyond its positions: vLLM's does
            not grow with a sequence as that of transformers does.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if context is None or kind not in ("longrope", "dynamic"):
            continue
        if kind == "dynamic" and context > module.config.max_position_embeddings:
            raise InputError(
                f"the rope of {path!r} is dynamic and the engines' context (actors.max_model_len) "
                f"{context} tokens, which must be at most its max_position_embeddings = "
                f"{module.config.max_position_embeddings}: beyond that vLLM and transformers "
                "compute positions differently"
            )
        if kind == "longrope":
            factors, _ = ROPE_INIT_FUNCTIONS[kind](
                module.config, module.inv_freq.device, seq_len=context
            )
            module.inv_freq = factors
            module.rope_type = "pinned"  # neither value has transformers choose again
