"""Model folders that are written file by file, so that no process holds all weights."""

import json
import shutil
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headway import folder_checksums
from headway.errors import InputError
from learner.config.lora import CONFIG_FILE, WEIGHTS_FILE
from learner.disk_wait import make_folder, write_text, write_whole
from learner.engine.tensor_parts import FILE_BYTES, in_buckets
from learner.model import lora
from learner.model.hf_names import HuggingFaceNames
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy

WEIGHTS = frozenset({
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pt",
    ".pth", ".safetensors", ".tflite",
})  # fmt: skip
"""Endings of files that have weights, in one form or another."""
LOSSES_FILE = "losses.jsonl"
"""File with a row for each step of the supervised training that made a folder."""
OWN = frozenset({"state.json", "origin.json", folder_checksums.FILE_NAME, CONFIG_FILE, LOSSES_FILE})
"""Files that say what a folder was made with, which are not copied to another."""
CONFIG = "config.json"
SUBFOLDERS = ("additional_chat_templates", "custom_generate")
"""Folders that are copied with the files beside the weights."""


@cache
def folder_with_files(model: str) -> Path:
    """Return the folder of a model; of a hub name its snapshot, with all but weights fetched."""
    from huggingface_hub import snapshot_download

    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, ignore_patterns=[f"*{ending}" for ending in WEIGHTS]))


def write_files(model: Any, origin: str, folder: Path, *, adapter: bool = False) -> None:
    """Write what belongs beside the weights of a transformers model; waits while the disk is full.

    Files of the folder or hub name `origin`, such as tokenizer, templates and licence, are copied.
    Its config.json changes only where the dtype does, and is written anew for a model of another
    kind than it describes; an `adapter` has none.
    """
    source = folder_with_files(origin)
    make_folder(folder)
    config = None if adapter else _new_config(model, source / CONFIG)
    if not folder.samefile(source):
        left_out = OWN | {CONFIG} if adapter else OWN
        write_whole(folder, partial(_copy_files, source, folder, left_out))
    if config is not None:
        write_text(folder / CONFIG, config)


def _copy_files(source: Path, folder: Path, left_out: frozenset[str]) -> None:
    for file in source.iterdir():
        weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in left_out:
            shutil.copyfile(file, folder / file.name)
    for name in SUBFOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)


def _new_config(model: Any, file: Path) -> str | None:
    """Return another text for the config.json that a model was loaded by; None: it stays."""
    dtype, kind = str(model.dtype).removeprefix("torch."), type(model).__name__
    stored = json.loads(file.read_text(encoding="utf-8"))
    if model.can_generate() and stored.get("architectures") == [kind]:
        stated = _with_dtype(stored, dtype)
        return None if stated == stored else json.dumps(stated, indent=2)
    model.config.dtype, model.config.architectures = dtype, [kind]
    text: str = model.config.to_json_string()
    return text


def _with_dtype(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return settings that state this dtype wherever they, or those of a part, state one."""
    return {
        name: _with_dtype(value, dtype)
        if isinstance(value, dict)
        else dtype
        if name in ("dtype", "torch_dtype") and isinstance(value, str)
        else value
        for name, value in settings.items()
    }


def write_weights(model: Any, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write weights under the names that transformers looks for; waits while the disk is full.

    `weights` are those of the whole model by their names in it, each valid until the next.
    """
    files: list[tuple[Path, list[str], int]] = []
    copies = (
        (name, tensor.to("cpu", copy=True, memory_format=torch.contiguous_format))
        for name, tensor in HuggingFaceNames(model).of(weights)
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
    model = load_policy(base, options, dtype=dtype, attention="auto").model
    lora.add_adapter(model, adapter.config, seed=0)
    write_files(model, base, folder)
    write_weights(model, ((weight.name, weight.value()) for weight in lora.weights(model)), folder)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / file).unlink()
