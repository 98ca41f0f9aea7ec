"""What is published of a model is what its folder holds, name by name."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.model.hf_names import HuggingFaceNames
from tests.learner.model.architectures import write


def test_fused_experts_come_one_by_one_as_in_the_folder(tmp_path):
    write("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    found = dict(HuggingFaceNames(model).of(weights))
    assert found.keys() == saved.keys() != dict(weights).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_weights_of_a_dense_model_pass_unchanged_and_in_order(tmp_path):
    write("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = list(model.named_parameters())
    found = list(HuggingFaceNames(model).of(weights))
    assert [name for name, _ in found] == [name for name, _ in weights]
    assert all(one is two for (_, one), (_, two) in zip(found, weights, strict=True))
