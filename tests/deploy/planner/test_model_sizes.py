"""What is measured without data, against the same computed with data."""

import json
from dataclasses import replace

import pytest
import torch

from actors.engines.model_folder import attention_heads, kv_bytes_per_token
from deploy.planner.model_sizes import Allocations, Microbatch, measure_model
from learner.config.lora import LoraConfig
from learner.model.logprobs import LogprobOptions
from learner.model.lora import add_adapter
from learner.model.packed_attention import attend_packed
from learner.model.policy import Policy, checkpoint_activations

SMALL = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 24, "head_dim": 8, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 24, "num_key_value_heads": 4,
    "first_k_dense_replace": 3, "n_routed_experts": 4,
}  # fmt: skip
HEAD = LogprobOptions(chunk=64)
LONGEST, SEQUENCES = 96, 3


def microbatch(**changes):
    return replace(
        Microbatch(
            tokens=LONGEST * SEQUENCES, longest=LONGEST, dtype="float32", attention="sdpa",
            activation_checkpointing=False, head=HEAD,
        ),
        **changes,
    )  # fmt: skip


def model(folder, **settings):
    """Write a model's description into a folder, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama", **settings}))
    return str(folder)


def with_data(folder, *, dtype, checkpointing, lora=None):
    """Return the bytes that a microbatch keeps and its peak, computed with data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    assert attend_packed(model)
    if lora is not None:
        add_adapter(model, lora, seed=0)
    if checkpointing:
        checkpoint_activations(model, str(folder))
    for parameter in (tensor for tensor in model.parameters() if tensor.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
    positions = torch.arange(LONGEST).repeat(SEQUENCES)
    policy = Policy(model, HEAD)
    with Allocations(model) as allocations:
        logprobs, _ = policy(torch.ones_like(positions), positions)
        kept = allocations.live
        logprobs.sum().backward()
    return kept, allocations.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "deepseek_v3"])
def test_a_microbatch_needs_what_it_needs_with_data(tmp_path, kind, checkpointing, dtype):
    folder = model(tmp_path, model_type=kind, **(MLA if kind == "deepseek_v3" else {}))
    sizes = measure_model(folder, microbatch(dtype=dtype, activation_checkpointing=checkpointing))
    kept, peak = with_data(tmp_path, dtype=dtype, checkpointing=checkpointing)
    assert sizes.activations == pytest.approx(kept, rel=0.03)
    assert sizes.activations + sizes.passing == pytest.approx(peak, rel=0.05)


def test_values_may_be_narrower_than_queries(tmp_path):
    sizes = {}
    for width in (8, 24):  # queries have 24
        settings = {**MLA, "v_head_dim": width, "model_type": "deepseek_v3"}
        batch = microbatch(tokens=LONGEST, dtype="bfloat16")
        sizes[width] = measure_model(model(tmp_path / str(width), **settings), batch)
    assert sizes[8].parameters < sizes[24].parameters
    assert 0.5 * sizes[24].activations < sizes[8].activations < sizes[24].activations


def test_an_adapter_is_measured_as_it_is_trained(tmp_path):
    lora = LoraConfig(rank=4, path="is not read")
    sizes = measure_model(model(tmp_path), microbatch(lora=lora))
    plain = lora.model_copy(update={"path": None})
    kept, peak = with_data(tmp_path, dtype="float32", checkpointing=False, lora=plain)
    assert sizes.activations == pytest.approx(kept, rel=0.03)
    assert sizes.activations + sizes.passing == pytest.approx(peak, rel=0.05)
    widths = 4 * (64 + 64) + 3 * (64 + 96)
    assert sizes.trained == 3 * 4 * (widths - 2 * 2 * 16)
    assert sizes.parameters > sizes.trained


def test_checkpointing_keeps_a_fraction_and_more_tokens_keep_more(tmp_path):
    def activations(tokens, *, checkpointing=False):
        batch = microbatch(tokens=tokens, longest=128, activation_checkpointing=checkpointing)
        return measure_model(model(tmp_path), batch).activations

    assert activations(512) == pytest.approx(2 * activations(256), rel=0.05)
    assert activations(512, checkpointing=True) < 0.2 * activations(512)


@pytest.mark.parametrize(
    ("settings", "heads", "numbers"),
    [
        ({"model_type": "llama"}, (4, 2), 2 * 2 * 16),
        ({"model_type": "deepseek_v3", **MLA}, (4, 1), 24 + 8),
    ],
)
def test_the_cache_of_a_token_has_keys_and_values_of_each_head_or_one_vector_for_all(
    tmp_path, settings, heads, numbers
):
    folder = model(tmp_path, **settings)
    assert attention_heads(folder) == heads
    assert kv_bytes_per_token(folder, "bfloat16") == 3 * numbers * 2
    assert kv_bytes_per_token(folder, "float32") == 3 * numbers * 4
