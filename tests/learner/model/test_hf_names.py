"""What is published of a model is what its folder holds, name by name."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter

from headway.errors import InputError
from learner.model.hf_names import HuggingFaceNames
from tests.learner.model.architectures import configuration, write


@pytest.mark.parametrize("family", ["hrm_text", "qwen3_moe"])
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
