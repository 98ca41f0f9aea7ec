"""Model folders that are written file by file, so that no process holds all weights."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.errors import InputError
from learner.config.lora import CONFIG_FILE, WEIGHTS_FILE
from learner.disk_wait import write_text, write_whole
from learner.engine.tensor_parts import FILE_BYTES, in_buckets
from learner.model import lora
from learner.model.hf_names import HuggingFaceNames
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy


def write_config(model: Any, folder: Path) -> None:
    """Write the files of a transformers model beside its weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        settings = folder / "generation_config.json"  # save_pretrained refuses what does not fit
        model.generation_config.to_json_file(settings)


def write_weights(model: Any, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write weights under the names that transformers looks for; waits while the disk is full.

    `weights` are those of the whole model by their names in it, each valid until the next; buffers
    that its folder has too are taken from the model.
    """
    files: list[tuple[Path, list[str], int]] = []
    copies = (
        (name, tensor.to("cpu", copy=True, memory_format=torch.contiguous_format))
        for name, tensor in HuggingFaceNames(model).of(chain(weights, _buffers(model)))
    )
    for tensors in map(dict, in_buckets(copies, lambda entry: entry[1].nbytes, FILE_BYTES)):
        path = folder / f"model-{len(files) + 1:05d}.safetensors"
        write_whole(path, partial(save_file, tensors, path, {"format": "pt"}))
        files.append((path, list(tensors), sum(tensor.nbytes for tensor in tensors.values())))
        del tensors
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for path, names, _ in files:
        named = f"{path.stem}-of-{len(files):05d}.safetensors"
        path.rename(folder / named)
        places |= dict.fromkeys(names, named)
    index = {"metadata": {"total_size": sum(size for *_, size in files)}, "weight_map": places}
    write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))


def _buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def merge_adapter(folder: Path, base: str | None = None) -> None:
    """Turn an adapter folder into that of the whole model, its adapter merged in.

    `base` is the folder or hub name of that model; None: the one that the adapter names.

    Raises:
        InputError: The adapter or the model cannot be loaded, or it was trained on another.
    """
    adapter = lora.read_adapter(folder)
    base = base or adapter.base
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise InputError(
            f"{base!r}, which the adapter was trained on, is not here: name the folder that has "
            "its weights with --base"
        )
    dtype = str(next(iter(adapter.tensors.values())).dtype).removeprefix("torch.")
    options = LogprobOptions(chunk=1)
    model = load_policy(base, options, dtype=dtype, attention="sdpa").model
    lora.add_adapter(model, adapter.config, seed=0)
    write_config(model, folder)
    write_weights(model, ((weight.name, weight.value()) for weight in lora.weights(model)), folder)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / file).unlink()
