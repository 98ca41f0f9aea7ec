"""Weight decay leaves norms, biases and embeddings out, in models of many kinds."""

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from learner.engine.parameter_groups import no_matrices

pytestmark = pytest.mark.deepspeed
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
OPT = {
    "vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "word_embed_proj_dim": 16,
}  # fmt: skip
KINDS = [
    ("qwen3", SMALL), ("llama", SMALL), ("qwen2", SMALL), ("gemma2", SMALL), ("cohere2", SMALL),
    ("gpt2", GPT2), ("opt", OPT), ("gpt_oss", {**SMALL, "num_local_experts": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("tied", [True, False])
def test_what_decays_are_the_weights_of_linear_maps(kind, sizes, tied):
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    spared, ends = no_matrices(model), (model.get_input_embeddings(), model.get_output_embeddings())
    assert (ends[0].weight is ends[1].weight) == tied
    for name, parameter in model.named_parameters():
        last = name.split(".")[-1]
        norm = "norm" in name or ".ln_" in name
        embedding = "embed" in name or "wte" in name or "wpe" in name
        is_matrix = parameter.ndim >= 2 and not (norm or embedding or "bias" in last)
        assert (id(parameter) not in spared) == is_matrix, name
    assert id(ends[0].weight) in spared


def test_a_head_of_values_decays_as_other_matrices():
    config = AutoConfig.for_model("qwen3", **SMALL)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    assert id(model.score.weight) not in no_matrices(model)


class Scaled(nn.Module):
    """A layer with a norm of several heads and an embedding that is a plain parameter."""

    def __init__(self):
        super().__init__()
        self.rows = HeadNorm()
        self.position_embedding = nn.Parameter(nn.Linear(3, 3).weight.detach())
        self.mix = nn.Parameter(nn.Linear(3, 3).weight.detach())


class HeadNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(3, 3).weight.detach())


def test_norms_of_heads_and_plain_embeddings_are_left_out_too():
    layer = Scaled()
    spared = {id(layer.rows.weight), id(layer.position_embedding)}
    assert no_matrices(layer) == spared
