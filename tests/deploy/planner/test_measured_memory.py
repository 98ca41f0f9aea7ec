"""Predicted memory against the peak that the processes of whole runs reached, on the CPU."""

import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from deploy.config.loader import load_recipe
from deploy.planner.byte_counts import MIB
from deploy.preflight.memory_check import check_memory
from deploy.runtime.peak_memory import peaks
from headway.roles import Role
from tests.deploy.conftest import HEADWAY

CHARACTERS = "0123456789+-=,abcdefghijklmnopqr"
RECIPE = """
name = "measured"
steps = 8
model.path = "model"
prompts = { source = "lettered_chain_sum", groups_per_batch = 4, group_size = 4 }
queues.max_staleness = 1
deploy.metrics = false
[actors]
reward = ["last_answer"]
max_new_tokens = 100
max_model_len = 128
max_concurrent_rollouts = 32
cores = ["0"]
kv_cache_gib = 0.25
[learner]
cores = "1"
learning_rate = 1e-6
microbatch_tokens = 768
logprob_chunk = 256
checkpoint_every = 1
"""
QWEN = {
    "model_type": "qwen2", "hidden_size": 448, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 7, "num_key_value_heads": 1, "vocab_size": 24000,
}  # fmt: skip
LLAMA = {**QWEN, "model_type": "llama", "vocab_size": 16000, "tie_word_embeddings": False}
HALF = ("learner.dtype=bfloat16", "actors.dtype=bfloat16")
FEW = (*HALF, "steps=3")
"""Fewer batches, for a CPU without instructions of bfloat16 takes 100 s for each; the heaps of two
ranks grow over five."""
CASES = {
    "float32": (QWEN, ()),
    "stage 0": (LLAMA, ("learner.zero_stage=0",)),
    "stage 2": (QWEN, ("learner.zero_stage=2",)),
    "bfloat16, stage 1": (QWEN, FEW),
    "bfloat16, stage 2": (LLAMA, (*FEW, "learner.zero_stage=2")),
    "bfloat16, stage 3": (QWEN, (*FEW, "learner.zero_stage=3")),
    "checkpointing": (
        {**QWEN, "num_hidden_layers": 12},
        ("learner.activation_checkpointing=true", "learner.microbatch_tokens=1792"),
    ),
    "reference": (
        {**QWEN, "model_type": "qwen3", "head_dim": 64},
        ("learner.kl.coefficient=0.1", "weight_sync.wire_dtype=bfloat16"),
    ),
    "critic": (QWEN, ("learner.advantage=gae", "learner.critic.clip=0.5")),
    "deltas": (QWEN, ("weight_sync.codec=delta",)),
    "two ranks": (QWEN, (*HALF, "steps=6", "learner.ranks=2", "learner.zero_stage=2")),
    "offloaded": (
        QWEN,
        (*FEW, "learner.ranks=2", "learner.zero_stage=2", "learner.offload_optimizer=true"),
    ),
}


def write_model(folder: Path, settings: dict) -> None:
    """Write a model with random weights and a tokenizer of a character a token."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from learner.model.tiny_tokenizer import tiny_tokenizer

    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True}
    kind = settings["model_type"]
    config = CONFIG_MAPPING[kind](**{**ends, "max_position_embeddings": 512, **settings})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer(CHARACTERS, 512).save_pretrained(folder)


def peaks_until_it_ends(process: subprocess.Popen) -> Counter[Role]:
    """Return the peak resident bytes of learner and actor, engine included, as the run ends."""
    highest, run = Counter[Role](), psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            highest |= peaks(run)
        time.sleep(0.1)
    return highest


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.parametrize("name", CASES)
def test_predicted_memory_is_within_a_tenth_of_the_measured_peak(name, tmp_path, monkeypatch):
    settings, overrides = CASES[name]
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", settings)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    arguments = [part for override in overrides for part in ("--set", override)]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [HEADWAY, "run", recipe, *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            measured = peaks_until_it_ends(process)
        finally:  # also past the test's limit
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, (tmp_path / "output").read_text()
    predicted = check_memory(load_recipe(str(recipe), overrides), Console(quiet=True))
    for role in predicted.processes:
        needs, reached = role.all_resident, measured[role.role]
        parts = {part: round(size / MIB) for part, size in role.resident.items()}
        print(f"{name}, {role.role}: {needs / MIB:.0f} of {reached / MIB:.0f} MiB, {parts}")
        assert needs == pytest.approx(reached, rel=0.1), role.role
