"""Reads a model folder or hub name: tokenizer, context length, weight shapes.

`check_model` decides from its description whether a model can be trained here at all. The learner
chooses, once the model is loaded, how its sequences are computed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import InputError, first_line

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip
"""A tokenizer has at least one of these files."""

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the architectures that predict the next token."""

QUANTISED = ("quantization_config", "compression_config", "quantization")
QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Settings in config.json, and files, that say how the weights of a model are quantised."""

LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Settings in config.json that name the longest sequence: of most models, of MPT and of BLOOM."""


def check_model(model_path: str, *, weights: bool = True) -> None:
    """Check the description of a model, and the headers of its `weights` if it is a folder.

    Raises InputError if a file is missing or broken, or the model is quantised or does not predict
    the next token.
    """
    refuse_quantised(model_path)
    description = describe(model_path)
    names = [*map(str, description.get("architectures") or ())]
    if description.get("is_encoder_decoder") or (names and not names[0].endswith(CAUSAL)):
        raise InputError(
            f"model {model_path!r} is a {', '.join(names) or description.get('model_type')}, which "
            "does not predict the next token; give a causal language model, one whose "
            "architecture ends in ForCausalLM"
        )
    if weights and Path(model_path).is_dir():
        weight_shapes(model_path)


def refuse_quantised(model_path: str) -> None:
    """Raise InputError if a model's description, or a file in its folder, says it is quantised."""
    description = describe(model_path)
    parts = [description, *(part for part in description.values() if isinstance(part, dict))]
    notes = [
        f"{name} of config.json: {how.get('quant_method', how) if isinstance(how, dict) else how}"
        for settings in parts
        for name in QUANTISED if (how := settings.get(name))
    ]  # fmt: skip
    notes += [name for name in QUANTISED_FILES if (Path(model_path) / name).is_file()]
    if notes:
        raise InputError(
            f"model {model_path!r} has quantised weights ({notes[0]}), which can neither be "
            "trained nor replaced in engines; give the model that it was made from"
        )


def describe(model_path: str) -> Mapping[str, Any]:
    """Return the description of a model; raise InputError if it is missing or broken."""
    folder = Path(model_path)
    if folder.is_dir():
        return read_description(folder)
    description: Mapping[str, Any] = configuration(model_path).to_dict()
    return description


def read_description(folder: Path) -> Mapping[str, Any]:
    """Return the contents of `config.json`; raise InputError if it is missing or broken."""
    file = folder / "config.json"
    try:
        description = json.loads(file.read_text())
    except FileNotFoundError:
        hint = ""
        if (folder / "adapter_config.json").exists():
            hint = ": it is an adapter; name its model there, and it in learner.lora.path"
        raise InputError(f"model folder {str(folder)!r} has no config.json{hint}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(description, dict):
        raise InputError(f"{file} holds a {type(description).__name__}, must be a JSON object")
    return description


def configuration(model_path: str) -> Any:
    """Return the configuration as transformers reads it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=False)  # nor ask for it
    except Exception as error:  # each type of model checks its settings in a way of its own
        where = "" if Path(model_path).is_dir() else " is no folder here, and from the hub it"
        raise InputError(
            f"model {model_path!r}{where} cannot be read: {first_line(error)}"
        ) from error


def load_tokenizer(model_path: str) -> Any:
    """Load a tokenizer; raise InputError if that fails, without eos, or if white space is lost."""
    from transformers import AutoTokenizer

    folder = Path(model_path)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise InputError(  # transformers would make up an empty one
            f"model {model_path!r} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there"
        )
    try:
        # that of Mistral's own format has no chat template, and tells no special tokens
        tokenizer = AutoTokenizer.from_pretrained(
            model_path, mistral_format=False, trust_remote_code=False
        )
    except Exception as error:  # broken files raise whatever their reader raises
        raise InputError(f"model {model_path!r} has no tokenizer: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {model_path!r} has no end-of-sequence token, so no rollout could "
            "end; name its eos_token in tokenizer_config.json"
        )
    lossy = tokenizer.decode(tokenizer.encode("a b", add_special_tokens=False)) == "ab"
    if lossy and "Ġ" in tokenizer.get_vocab():
        raise InputError(
            f"the tokenizer of {model_path!r} loses white space as {type(tokenizer).__name__}; "
            'write "tokenizer_class": "PreTrainedTokenizerFast" into its tokenizer_config.json'
        )
    return tokenizer


def end_ids(model_path: str, tokenizer: Any) -> frozenset[int]:
    """Return the tokens at which engines stop: eos, and those of the generation settings.

    Raises InputError if they are no numbers.
    """
    named = generation_settings(model_path).get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    ends = frozenset(i for i in [tokenizer.eos_token_id, *ids] if i is not None)
    if any(type(i) is not int or i < 0 for i in ends):
        raise InputError(f"eos_token_id = {named!r} of {model_path!r} must be ids of tokens")
    return ends


def generation_settings(model_path: str) -> dict[str, Any]:
    """Return a model's settings for generation; raise InputError for broken ones."""
    from transformers import GenerationConfig

    try:
        try:
            settings = GenerationConfig.from_pretrained(model_path)
        except OSError:
            if (Path(model_path) / "generation_config.json").exists():
                raise  # it is broken; without the file, engines take those in config.json
            settings = GenerationConfig.from_model_config(configuration(model_path))
    except InputError:
        raise
    except Exception as error:  # a broken file raises whatever its contents lead to
        raise InputError(f"generation_config.json of {model_path!r}: {error}") from error
    return dict(settings.to_diff_dict())


def context_length(model_path: str) -> int:
    """Return the longest sequence, in tokens; raise InputError if the configuration names none."""
    config = configuration(model_path).get_text_config()
    for name in LENGTHS:
        if isinstance(length := getattr(config, name, None), int):
            return length
    raise InputError(f"{model_path!r} names no {LENGTHS[0]}; set actors.max_model_len")


def vocabulary_size(model_path: str) -> int | None:
    """Return the rows of the model's embedding; None without vocab_size in its configuration."""
    size = getattr(configuration(model_path).get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def served_dtype(model_path: str, dtype: str) -> str:
    """Return the dtype that engines serve with `actors.dtype`; `auto` takes the model's own."""
    if dtype != "auto":
        return dtype
    config = configuration(model_path)
    stated = config.dtype or config.get_text_config().dtype
    return "auto" if stated is None else str(stated).removeprefix("torch.")


def attention_heads(model_path: str) -> tuple[int, int]:
    """Return how many heads attend, and how many have keys and values of their own.

    A model without attention counts as one head.
    """
    config = configuration(model_path).get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    if getattr(config, "kv_lora_rank", None):  # all heads of MLA read the same cache
        return heads, 1
    return heads, getattr(config, "num_key_value_heads", None) or heads


def parallel_sizes(model_path: str) -> tuple[int, ...]:
    """Return the values of `actors.tensor_parallel_size` by which vLLM can divide a model."""
    heads, kv_heads = attention_heads(model_path)
    return tuple(
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and max(size, kv_heads) % min(size, kv_heads) == 0
    )


def kv_bytes_per_token(model_path: str, dtype: str) -> int:
    """Return the bytes of KV cache for one token in all layers, if each is full attention.

    MLA keeps one compressed vector in place of all heads. `dtype` is that of `actors.dtype`.
    """
    config = configuration(model_path).get_text_config()
    itemsize = 4 if served_dtype(model_path, dtype) == "float32" else 2
    if compressed := getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers * (compressed + config.qk_rope_head_dim) * itemsize)
    heads, kv_heads = attention_heads(model_path)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * kv_heads * width * itemsize)


def published_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a folder that transformers loads, so a learner has them.

    Others are masks, frequencies of positions, layers that predict further tokens, and the weights
    once more under the names of Mistral's own format.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(model_path))
    tensors, shapes = model.state_dict(), weight_shapes(model_path)
    loaded = tensors.keys() - model.all_tied_weights_keys.keys()
    conversions: tuple[list[Any], list[Any]] = [], []
    for conversion in get_model_conversion_mapping(model):
        conversions[not isinstance(conversion, WeightRenaming)].append(conversion)

    def has(name: str) -> bool:
        names = (
            rename_source_key(name, *tried, model.base_model_prefix, tensors)[0]
            for tried in (conversions, ([], []))
        )
        return any(new in loaded and (new == name or new not in shapes) for new in names)

    return {name: shapes[name] for name in sorted(shapes) if has(name)}


def weight_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a folder; raise InputError if a file is broken."""
    from huggingface_hub import snapshot_download
    from safetensors import SafetensorError, safe_open

    folder = Path(model_path)
    if not folder.is_dir():
        folder = Path(snapshot_download(model_path, allow_patterns=["*.safetensors", "*.json"]))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read as safetensors: {error}") from None
    if not shapes:
        raise InputError(f"model {model_path!r} has no model.safetensors file")
    if read_description(folder).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that weights are loaded from; raise InputError for those that are not there.

    Others beside them, such as `consolidated.safetensors`, have the same weights by other names.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("model*.safetensors"))
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        files = sorted({folder / name for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} has no map of weights: {error!r}") from None
    if missing := [file.name for file in files if not file.exists()]:
        raise InputError(f"model {str(folder)!r} lacks {', '.join(missing)}, named in {index}")
    return files
