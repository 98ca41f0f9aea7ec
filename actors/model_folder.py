"""What actors read from a model folder or hub name: tokenizer, context length, weight shapes."""

import json
from pathlib import Path
from typing import Any

from actors.errors import InputError


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a model.

    Raises:
        InputError: It cannot be loaded, or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise InputError(f"model {model_path!r} has no tokenizer: {error}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {model_path!r} has no end-of-sequence token")
    return tokenizer


def context_length(model_path: str) -> int:
    """Longest sequence, in tokens, that the model is made for.

    Raises:
        InputError: The model's configuration does not say.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path).get_text_config()
    except (OSError, ValueError) as error:
        raise InputError(f"model {model_path!r} cannot be read: {error}") from error
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise InputError(f"{model_path!r} names no max_position_embeddings; set max_model_len")
    return length


def weight_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a learner publishes for this model.

    Raises:
        InputError: No safetensors file.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = Path(model_path)
    if not folder.is_dir():
        folder = Path(snapshot_download(model_path, allow_patterns=["*.safetensors", "*.json"]))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    if not shapes:
        raise InputError(f"model {model_path!r} has no *.safetensors file")
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes
