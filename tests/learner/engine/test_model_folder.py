"""Folders that are written tensor by tensor: those that transformers writes."""

import pytest
import torch
from safetensors.torch import load_file

from learner.engine.model_folder import write_config, write_weights
from learner.model import lora
from tests.learner.model.architectures import configuration, kind_of, write


def tensors(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gemma4, some windows", "gpt2"]
)
def test_a_folder_has_every_tensor_and_buffer_that_transformers_writes(
    tmp_path, monkeypatch, family
):
    monkeypatch.setattr("learner.engine.model_folder.FILE_BYTES", 2**12)
    (own := tmp_path / "own").mkdir()
    write(family, tmp_path)
    model = kind_of(configuration(family)).from_pretrained(tmp_path)
    for _, buffer in model.named_buffers():
        buffer.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    write_config(model, own)
    write_weights(model, ((one.name, one.value()) for one in lora.weights(model)), own)
    expected, found = tensors(tmp_path), tensors(own)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
