"""Attention by sequences: the same numbers as with a mask, and left alone where it is not."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from learner.model import packed_attention
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import BY_SEQUENCE, NAME, attend_packed
from learner.model.policy import Policy, load_policy
from learner.model.ways import Way
from tests.learner.model.architectures import configuration

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


def make(config, attention="sdpa"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def row():
    torch.manual_seed(1)
    tokens = torch.randint(40, (sum(LENGTHS),))
    return tokens, torch.cat([torch.arange(length) for length in LENGTHS])


def dense_varlen_attention(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """Compute what torch documents of `varlen_attn`, which runs on GPUs alone, with one mask."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff()
    assert max_q == max_k == lengths.max()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.arange(len(query))
    left, right = (len(query) if size < 0 else size for size in window_size)
    behind = place[:, None] - place[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (behind <= left) & (-behind <= right)
    if enable_gqa:
        key, value = (kv.repeat_interleave(query.shape[1] // kv.shape[1], 1) for kv in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def varlen_attention_of_torch_2_11(*columns, scale, window_size):
    """Compute the same, for any number of key heads."""
    options = {"scale": scale, "window_size": window_size, "enable_gqa": True}
    return dense_varlen_attention(*columns, **options)


def outcome(model, way=Way.PACKED):
    """Log-probabilities of a row, and their gradient in every weight."""
    model.zero_grad()
    policy = Policy(model, LogprobOptions(chunk=8))
    policy.way = way
    logprobs, _ = policy(*row())
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
@pytest.mark.parametrize("at_once", [False, True])
def test_a_sequence_that_is_longer_than_a_window_is_cut_by_it(config, at_once, monkeypatch):
    if at_once:
        monkeypatch.setattr(packed_attention, "_has_kernel", lambda query: True)
        monkeypatch.setattr(packed_attention, "varlen_attn", dense_varlen_attention)
    model = make(config)
    expected, gradients = outcome(model)
    assert attend_packed(model)
    found, own = outcome(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for each, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("varlen_attn", [dense_varlen_attention, varlen_attention_of_torch_2_11])
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig])
def test_one_call_for_all_sequences_gives_the_numbers_of_one_for_each(
    kind, varlen_attn, monkeypatch
):
    model = make(kind(**SIZES))
    assert attend_packed(model)
    expected, gradients = outcome(model)
    monkeypatch.setattr(packed_attention, "_has_kernel", lambda query: True)
    monkeypatch.setattr(packed_attention, "varlen_attn", varlen_attn)
    found, own = outcome(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for each, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-5)


def test_chunks_are_left_to_their_mask():
    config = Llama4TextConfig(
        **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8,
        pad_token_id=0,
    )  # fmt: skip
    model = make(config)
    assert not attend_packed(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_layers_are_not_told_of_positions_keeps_its_mask():
    model = make(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    expected, _ = outcome(model)
    attend_packed(model)
    torch.testing.assert_close(outcome(model)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss, some windows", "mistral, window"])
def test_attention_step_by_step_is_computed_by_sequences_too(name):
    """With caps, sinks and windows, which it heeds."""
    model = make(configuration(name), "eager")
    expected, gradients = outcome(model, Way.ALONE)
    assert attend_packed(model)
    assert model.config._attn_implementation == BY_SEQUENCE["eager"]
    found, own = outcome(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for each, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss, some windows"])
def test_kernels_are_not_given_what_they_leave_out(name):
    model = make(configuration(name), "eager")
    attend_packed(model)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"is given (softcap|s_aux), which kernels leave out"):
        outcome(model)


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
