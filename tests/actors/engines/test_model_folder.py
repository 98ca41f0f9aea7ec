"""Model folders as people have them: quantised ones, lengths, and weights that nothing loads."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.engines.model_folder import (
    check_model,
    context_length,
    weight_shapes,
)
from headway.errors import InputError

GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("description", "file", "named"),
    [
        ({"quantization_config": GPTQ}, None, "quantization_config of config.json: gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, None, "{'load_in_4bit': True}"),
        ({"text_config": {"quantization_config": GPTQ}}, None, "config.json: gptq"),
        ({"llm_config": {"quantization_config": GPTQ}, "text_config": []}, None, "json: gptq"),
        ({"compression_config": {"format": "int"}}, None, "compression_config of config.json"),
        ({"quantization": {"bits": 4}}, None, "quantization of config.json"),
        ({}, "hf_quant_config.json", "hf_quant_config.json"),
        ({}, "quantize_config.json", "quantize_config.json"),
        ({}, "quant_config.json", "quant_config.json"),
    ],
)
def test_a_quantised_model_is_refused_by_the_note_that_says_so(tmp_path, description, file, named):
    settings = {"architectures": ["LlamaForCausalLM"], **description}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    if file:
        (tmp_path / file).write_text("{}")
    message = rf"has quantised weights \(.*{re.escape(named)}.*give the model that it was made from"
    with pytest.raises(InputError, match=message):
        check_model(str(tmp_path))


def described(folder, model_type, **settings):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **settings}))
    return str(folder)


def weights(folder, names, file="model.safetensors"):
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / file)


@pytest.mark.parametrize(
    ("description", "length"),
    [
        ({"model_type": "qwen3", "max_position_embeddings": 66}, 66),
        ({"model_type": "mpt", "max_seq_len": 77}, 77),
        ({"model_type": "bloom", "seq_length": 88}, 88),
        ({"model_type": "gpt2", "n_positions": 99}, 99),
    ],
)
def test_the_longest_sequence_is_the_one_that_the_folder_names(tmp_path, description, length):
    assert context_length(described(tmp_path, **description)) == length
    with pytest.raises(InputError, match=r"names no max_.*; set actors\.max_model_len"):
        context_length(described(tmp_path, "mamba"))


def test_weights_are_those_of_the_files_that_are_loaded(tmp_path):
    weights(tmp_path, ["layers.0.wq.weight"], "consolidated.safetensors")
    path = described(tmp_path, "mistral")
    with pytest.raises(InputError, match=r"has no model\.safetensors file"):
        weight_shapes(path)
    weights(tmp_path, ["a"])
    assert weight_shapes(path).keys() == {"a"}
    weights(tmp_path, ["b"], "first.safetensors")
    index = {"weight_map": {"b": "first.safetensors", "c": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"lacks second\.safetensors, named in"):
        weight_shapes(path)
    weights(tmp_path, ["c"], "second.safetensors")
    assert weight_shapes(path).keys() == {"b", "c"}
