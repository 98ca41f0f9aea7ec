"""What is published of a model is what its folder holds, name by name."""

import torch
from safetensors.torch import load_file

from learner.model.hf_names import HuggingFaceNames

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_fused_experts_come_one_by_one_as_in_the_folder(tmp_path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
            mlp_only_layers=[], decoder_sparse_step=1,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path)  # as a learner has it
    saved = load_file(tmp_path / "model.safetensors")
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    found = dict(HuggingFaceNames(model).of(weights))
    assert found.keys() == saved.keys() != dict(weights).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_weights_of_a_dense_model_pass_unchanged_and_in_order() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    weights = list(model.named_parameters())
    found = list(HuggingFaceNames(model).of(weights))
    assert [name for name, _ in found] == [name for name, _ in weights]
    assert all(one is two for (_, one), (_, two) in zip(found, weights, strict=True))
