"""Attention by sequences: the same numbers as with a mask, and left alone where it is not."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from learner.model import packed_attention
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import NAME, attend_packed
from learner.model.policy import Policy, load_policy

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LENGTHS = [5, 1, 17, 3]


def make(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def row():
    torch.manual_seed(1)
    tokens = torch.randint(40, (sum(LENGTHS),))
    return tokens, torch.cat([torch.arange(length) for length in LENGTHS])


def outcome(model):
    """Log-probabilities of a row, and their gradient in every weight."""
    model.zero_grad()
    logprobs, _ = Policy(model, LogprobOptions(chunk=8))(*row())
    logprobs.square().sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_numbers_and_gradients_are_those_of_a_mask(kind, checkpointing, shared, monkeypatch):
    monkeypatch.setattr(packed_attention, "_shares_keys", lambda query: shared)
    model = make(kind(**SIZES))
    expected, gradients = outcome(model)
    assert attend_packed(model)
    assert model.config._attn_implementation == NAME
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    found, own = outcome(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for each, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-4)


def test_half_precision_attends_so_too():
    model = make(Qwen3Config(**SIZES)).to(torch.bfloat16)
    assert attend_packed(model)


def test_a_sequence_sees_no_other():
    model = make(Qwen3Config(**SIZES))
    assert attend_packed(model)
    policy = Policy(model, LogprobOptions(chunk=8))
    tokens, places = row()
    packed, _ = policy(tokens, places)
    alone = [
        policy(*part)[0] for part in zip(tokens.split(LENGTHS), places.split(LENGTHS), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=8),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ],
    ids=["all layers", "some layers"],
)
def test_a_window_is_left_to_its_mask(config):
    model = make(config)
    expected, _ = outcome(model)
    assert not attend_packed(model)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(outcome(model)[0], expected, rtol=0, atol=0)


def test_a_model_whose_layers_are_not_told_of_positions_keeps_its_mask():
    model = make(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    expected, _ = outcome(model)
    attend_packed(model)
    torch.testing.assert_close(outcome(model)[0], expected, rtol=1e-5, atol=1e-5)


def test_other_attention_is_left_alone():
    model = make(Qwen3Config(**SIZES))
    model.set_attn_implementation("eager")
    assert not attend_packed(model)
    assert model.config._attn_implementation == "eager"


def test_a_saved_model_does_not_tell(tmp_path):
    make(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "first")
    policy = load_policy(
        str(tmp_path / "first"), LogprobOptions(chunk=8), dtype="float32", attention="sdpa"
    )
    assert policy.model.config._attn_implementation == NAME
    policy.model.save_pretrained(tmp_path / "second")
    first, second = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    )
    assert NAME not in json.dumps(second)
    assert first == second
