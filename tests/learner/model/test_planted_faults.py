"""Faults planted into loaded bfloat16 models of 30 layers: each is refused, and no honest load."""

from dataclasses import replace

import pytest
import torch
from transformers import Gemma2Config, Qwen3MoeConfig

from headway.errors import InputError
from learner.model.forward_check import check_forward
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from tests.learner.model.architectures import BASE, EXPERTS, HEAD, write

CPU, LAYERS = torch.device("cpu"), 30
SIZES = {**BASE, **HEAD, "num_hidden_layers": LAYERS, "initializer_range": 0.15}
WINDOWS = ["sliding_attention" if i % 3 else "full_attention" for i in range(LAYERS)]
CAPPED, ROUTED = "gemma2", "qwen3_moe"
CONFIGS = {
    CAPPED: Gemma2Config(
        **SIZES, query_pre_attn_scalar=8, sliding_window=8, layer_types=WINDOWS,
        attn_logit_softcapping=5.0, final_logit_softcapping=10.0,
    ),
    ROUTED: Qwen3MoeConfig(**SIZES, **EXPERTS),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: str(tmp_path_factory.mktemp(name)) for name in CONFIGS}
    for name, folder in made.items():
        write(name, folder, CONFIGS[name])
    return made


def load(folder):
    options = {"dtype": "bfloat16", "attention": "auto", "context": 128}
    return load_policy(folder, LogprobOptions(chunk=64), **options)


def scaled(layers):
    for layer in layers:
        layer.self_attn.scaling *= 1.1


def uncapped_scores(policy, layers):
    for layer in layers:
        layer.self_attn.attn_logit_softcapping = None


def uncapped_logits(policy, layers):
    policy.model.config.final_logit_softcapping = None
    policy.options = replace(policy.options, cap=None)


def doubled_base(policy, layers):
    rope = policy.model.model.rotary_emb
    rope.inv_freq *= 2 ** -torch.linspace(0, 1, len(rope.inv_freq) + 1)[:-1]


def without_window(policy, layers):
    policy.model.config.layer_types[16] = "full_attention"


def without_windows(policy, layers):
    policy.model.config.sliding_window = 10**6


def other_activation(policy, layers):
    layers[9].mlp.experts.act_fn = torch.nn.ReLU()


def other_epsilon(policy, layers):
    layers[9].input_layernorm.eps = 0.1


def silent_head(policy, layers):
    layers[21].self_attn.o_proj.register_forward_pre_hook(
        lambda _, inputs: (torch.cat([0 * inputs[0][..., :8], inputs[0][..., 8:]], -1),)
    )


def other_head(policy, layers):
    weight = layers[21].self_attn.o_proj.weight.data
    weight[:, :8], weight[:, 8:16] = weight[:, 8:16].clone(), weight[:, :8].clone()


def other_expert(policy, layers):
    layers[12].mlp.experts.down_proj.data[3] *= -1


def larger_norm(policy, layers):
    layers[27].post_attention_layernorm.weight.data += 2**-6


def exchanged(policy, layers):
    layers[3], layers[4] = layers[4], layers[3]


def left_out(policy, layers):
    del layers[-1]
    policy.model.config.num_hidden_layers -= 1


FAULTS = [
    (CAPPED, lambda policy, layers: scaled(layers), "differ by up to"),
    (CAPPED, lambda policy, layers: scaled(layers[17:18]), "differ by up to"),
    (ROUTED, lambda policy, layers: scaled(layers[17:18]), "differ by up to"),
    (CAPPED, uncapped_scores, "differ by up to"),
    (CAPPED, uncapped_logits, "changes its logits"),
    (CAPPED, doubled_base, "differ by up to"),
    (ROUTED, doubled_base, "differ by up to"),
    (CAPPED, without_window, "differ by up to"),
    (CAPPED, without_windows, "differ by up to"),
    (ROUTED, other_activation, "differ by up to"),
    (CAPPED, other_epsilon, "differ by up to"),
    (CAPPED, silent_head, "differ by up to"),
    (CAPPED, other_head, r"weight .*21.*is not its folder's \(by"),
    (ROUTED, other_expert, r"weight .*12.*experts.*is not its folder's \(by"),
    (ROUTED, larger_norm, r"weight .*27.*is not its folder's \(by"),
    (ROUTED, exchanged, r"weight .*3.*is not its folder's \(by"),
    (CAPPED, left_out, r"lists of .*29.* layers, and its folder .*30"),
]


@pytest.mark.parametrize(
    ("name", "plant", "message"),
    [pytest.param(*FAULTS[i], marks=pytest.mark.slow if i % 3 else ()) for i in range(len(FAULTS))],
)
def test_a_planted_fault_is_refused(folders, name, plant, message):
    policy = load(folders[name])
    plant(policy, policy.model.model.layers)
    with pytest.raises(InputError, match=message):
        check_forward(policy, policy, device=CPU)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_honest_model_is_accepted(folders, name):
    policy = load(folders[name])
    check_forward(policy, policy, device=CPU)
