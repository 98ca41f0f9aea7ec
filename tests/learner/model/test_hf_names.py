"""What is published of a model is what its folder holds, name by name."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter

from actors.engines.model_folder import published_shapes
from headway.errors import InputError
from learner.model.hf_names import HuggingFaceNames
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from tests.learner.model.architectures import configuration, write


@pytest.mark.parametrize(
    "family", ["hrm_text", "qwen3_moe", "deepseek_v3", "minimax_m2", "exaone_moe"]
)
def test_what_is_published_is_what_the_folder_has_though_each_tensor_goes_when_the_next_comes(
    tmp_path, family
):
    write(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")

    def gathered():
        for name, parameter in model.named_parameters():
            whole = parameter.detach().clone()
            yield name, whole
            whole.fill_(torch.nan)

    found = {name: tensor.clone() for name, tensor in HuggingFaceNames(model).of(gathered())}
    assert found.keys() == saved.keys() != dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_weights_of_a_dense_model_pass_unchanged_and_in_order(tmp_path):
    write("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = list(model.named_parameters())
    found = list(HuggingFaceNames(model).of(weights))
    assert [name for name, _ in found] == [name for name, _ in weights]
    assert all(one is two for (_, one), (_, two) in zip(found, weights, strict=True))


class Forgetful(ConversionOps):
    """An operation that cannot be undone."""

    def convert(self, input_dict, **_):
        return input_dict

    @property
    def reverse_op(self):
        raise NotImplementedError("forgotten")


def test_a_model_whose_loading_cannot_be_undone_is_refused():
    model = AutoModelForCausalLM.from_config(configuration("llama"))
    model._weight_conversions = [WeightConverter("q_proj", "q_proj", [Forgetful()])]
    with pytest.raises(InputError, match="does not undo how it loads a LlamaForCausalLM: forgotte"):
        HuggingFaceNames(model)


BESIDE = {
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "mistral, window": ["norm.weight", "layers.0.attention.wq.weight"],
    "gpt2": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
    "gpt_neox": ["gpt_neox.layers.1.attention.bias"],
    "bloom": [],
    "qwen3_next": ["mtp.layers.0.mlp.gate.weight", "mtp.norm.weight"],
    "qwen3_5_text": ["mtp.fc.weight"],
    "nemotron_h": ["mtp.layers.0.norm.weight"],
    "deepseek_v3": ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"],
    "glm4_moe": ["model.layers.2.mlp.experts.0.gate_proj.weight"],
    "gemma4_text, shared keys": [],
    "minimax": [],
}
"""Tensors that folders of these models have beside those that transformers loads."""
BASE = ("llama", "mistral, window", "gpt2", "gpt_neox", "bloom")


@pytest.mark.parametrize(
    ("family", "begins_at_the_base"),
    [*((it, False) for it in BESIDE), *((it, True) for it in BASE)],
)
def test_engines_expect_what_is_published_whatever_else_a_folder_has(
    tmp_path, family, begins_at_the_base
):
    write(family, str(tmp_path))
    file = tmp_path / "model.safetensors"
    prefix = AutoModelForCausalLM.from_pretrained(tmp_path).base_model_prefix + "."
    own = load_file(file)
    if begins_at_the_base:
        own = {name.removeprefix(prefix): tensor for name, tensor in own.items()}
    save_file({name: torch.ones(4) for name in BESIDE[family]} | own, file)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    published = HuggingFaceNames(model).of(model.named_parameters())
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    assert {name: tuple(tensor.shape) for name, tensor in published} == expected
    assert published_shapes(str(tmp_path)) == expected


def test_buffers_that_follow_from_the_configuration_alone_are_not_published(tmp_path):
    write("minimax", str(tmp_path))
    file = tmp_path / "model.safetensors"
    own = {name: it for name, it in load_file(file).items() if not name.endswith("slope_rate")}
    save_file(own, file)
    options = {"dtype": "float32", "attention": "eager"}
    model = load_policy(str(tmp_path), LogprobOptions(chunk=8), **options).model
    assert "model.layers.0.self_attn.slope_rate" in model.state_dict()
    assert dict(HuggingFaceNames(model).of(model.named_parameters())).keys() == own.keys()
