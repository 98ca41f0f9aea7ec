"""Model folders that cannot be trained are refused by what their description says."""

import json
import re

import pytest

from actors.engines.model_folder import check_model
from headway.errors import InputError

GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("description", "file", "named"),
    [
        ({"quantization_config": GPTQ}, None, "quantization_config of config.json: gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, None, "{'load_in_4bit': True}"),
        ({"text_config": {"quantization_config": GPTQ}}, None, "config.json: gptq"),
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
