"""Folders that are written tensor by tensor: what transformers writes, and the files kept."""

import json

import pytest
import torch
from safetensors.torch import load_file

from learner.engine.model_folder import write_files, write_weights
from learner.model import lora
from tests.learner.model.architectures import (
    ARCHITECTURES,
    CONVERTED,
    configuration,
    kind_of,
    write,
)

FAMILIES = {name.partition(",")[0]: name for name in ARCHITECTURES | CONVERTED}
KEPT = {
    "LICENSE": "as it was\r\n",
    "README.md": "of the model",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "added_tokens.json": '{"<a>":  63}',
    "chat_template.jinja": "{{ messages }}\r\n",
    "custom_generate/generate.py": "def generate(): ...",
    "custom_generate/requirements.txt": "",
    "generation_config.json": '{"do_sample": false, "temperature": 0.6,  "eos_token_id": [2, 0]}',
    "merges.txt": "a b",
    "modeling_own.py": "class Own: ...",
    "preprocessor_config.json": "{ }",
    "special_tokens_map.json": '{"eos_token":   "<e>"}',
    "tekken.json": "{}",
    "tokenizer.json": '{"version":   "1.0"}',
    "tokenizer.model": "\x00\x01",
    "tokenizer_config.json": '{"chat_template": [{"name": "default"}],  "a": 1}',
}
LEFT_OUT = (
    "adapter_config.json", "checksums.json", "critic/model.json", "model-00001.safetensors",
    "model.safetensors.index.json", "origin.json", "pytorch_model.bin", "state.json",
)  # fmt: skip


def tensors(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if number % 4 else ())
        for number, name in enumerate(FAMILIES.values())
    ],
)
def test_a_folder_has_every_tensor_that_transformers_writes_and_loads_as_it_was(
    tmp_path, monkeypatch, family
):
    monkeypatch.setattr("learner.engine.model_folder.FILE_BYTES", 2**12)
    first, theirs, own = (tmp_path / name for name in ("first", "theirs", "own"))
    write(family, first)
    kind = kind_of(configuration(family))
    model = kind.from_pretrained(first)
    for _, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(theirs)
    write_files(model, str(first), own)
    write_weights(model, ((one.name, one.value()) for one in lora.weights(model)), own)
    expected, found = tensors(theirs), tensors(own)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    state = kind.from_pretrained(own).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def folder_of_all(folder):
    """Write a model with files of every kind, as people have them; return its path."""
    write("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config, indent=7) + "\r\n\n")
    for name, text in (KEPT | dict.fromkeys(LEFT_OUT, "{}")).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.mark.reported("gencfg_crash")
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_beside_weights_are_kept_byte_for_byte_but_for_a_dtype_that_changed(
    tmp_path, dtype, adapter
):
    """A temperature without do_sample, which folders on the hub have, transformers cannot save."""
    source, own = folder_of_all(tmp_path / "model"), tmp_path / "own"
    model = kind_of(configuration("llama")).from_config(configuration("llama")).to(dtype)
    write_files(model, str(source), own, adapter=adapter)
    written = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
    assert written == KEPT.keys() | (set() if adapter else {"config.json"})
    same = [name for name in written if dtype == torch.float32 or name != "config.json"]
    for name in same:
        assert (own / name).read_bytes() == (source / name).read_bytes(), name
    if not adapter:
        config = json.loads((own / "config.json").read_text())
        before = json.loads((source / "config.json").read_text())
        assert config == before | {"dtype": str(dtype).removeprefix("torch.")}


def test_a_folder_that_is_written_anew_in_its_place_keeps_its_files(tmp_path):
    source = folder_of_all(tmp_path / "model")
    model = kind_of(configuration("llama")).from_config(configuration("llama"))
    write_files(model, str(source), source)
    assert all((source / name).read_bytes() == text.encode() for name, text in KEPT.items())
