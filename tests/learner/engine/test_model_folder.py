"""Folders that are written tensor by tensor: those that transformers writes."""

import json

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


@pytest.mark.reported("gencfg_crash")
def test_settings_of_generation_are_written_as_they_were_though_they_do_not_fit(
    tmp_path,
):
    """Folders on the hub have a temperature without do_sample, which transformers does not save."""
    (own := tmp_path / "own").mkdir()
    write("gpt2", tmp_path)
    file = "generation_config.json"
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0]}
    (tmp_path / file).write_text(json.dumps(settings))
    model = kind_of(configuration("gpt2")).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.generation_config.save_pretrained(own)
    write_config(model, own)
    assert settings.items() <= json.loads((own / file).read_text()).items()
