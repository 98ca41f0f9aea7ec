"""The check of the pretrained model in bfloat16: faults of each kind, and honest loads."""

import json
from dataclasses import replace

import pytest
import torch

from headway.errors import InputError
from learner.model import forward_comparison
from learner.model.forward_check import check_forward
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from tests.learner.model import test_planted_faults as planted

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed]

CPU, LOADS = torch.device("cpu"), 200


@pytest.fixture(scope="module")
def windowed(model, tmp_path_factory):
    """Provide its weights with a window of 64 tokens in two of three layers."""
    folder = tmp_path_factory.mktemp("windowed")
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
    settings |= {"sliding_window": 64, "layer_types": planted.WINDOWS}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    return folder


def load(folder):
    options = {"dtype": "bfloat16", "attention": "auto", "context": 2048}
    return load_policy(str(folder), LogprobOptions(chunk=1024), **options)


def half_scale(policy, layers):
    layers[17].self_attn.scaling /= 2


def capped_logits(policy, layers):
    policy.options = replace(policy.options, cap=30.0)


def other_epsilon(policy, layers):
    layers[9].input_layernorm.variance_epsilon = 0.1


def other_activation(policy, layers):
    layers[9].mlp.act_fn = torch.nn.GELU()


def transposed(policy, layers):
    weight = layers[5].self_attn.o_proj.weight.data
    weight.copy_(weight.T.clone())


def other_embedding(policy, layers):
    policy.model.get_input_embeddings().weight.data[100:] *= 1 + 2**-7


FAULTS = [
    (lambda policy, layers: planted.scaled(layers), "differ by up to"),
    (half_scale, "differ by up to"),
    (capped_logits, "changes its logits"),
    (planted.doubled_base, "differ by up to"),
    (planted.without_window, "differ by up to"),
    (other_activation, "differ by up to"),
    (other_epsilon, "differ by up to"),
    (planted.silent_head, "differ by up to"),
    (planted.other_head, r"weight .*21.*is not its folder's \(by"),
    (planted.larger_norm, r"weight .*27.*is not its folder's \(by"),
    (planted.exchanged, r"weight .*3.*is not its folder's \(by"),
    (planted.left_out, r"lists of .*29.* layers, and its folder .*30"),
    (transposed, r"weight .*5.*is not its folder's \(by"),
    (other_embedding, r"weight .*embed.*is not its folder's \(by"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS)
def test_a_fault_planted_into_the_pretrained_model_is_refused(model, windowed, plant, message):
    policy = load(windowed if plant is planted.without_window else model)
    plant(policy, policy.model.model.layers)
    with pytest.raises(InputError, match=message):
        check_forward(policy, policy, device=CPU)


def test_the_pretrained_model_is_accepted_in_every_load(model, windowed, monkeypatch):
    """Each load is checked on other tokens, every tenth with windows."""
    for seed in range(LOADS):
        monkeypatch.setattr(forward_comparison, "SEED", seed)
        policy = load(model if seed % 10 else windowed)
        check_forward(policy, policy, device=CPU)
