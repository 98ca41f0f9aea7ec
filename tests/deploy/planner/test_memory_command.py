"""`headway validate` and `plan` print the memory; they and `run` refuse what cannot fit."""

import json
import shutil
import tomllib

import pytest
import torch

from deploy.preflight.memory_check import memory_of_gpu
from headway.errors import InputError
from tests.deploy.conftest import call_main

CONFIG = {
    "model_type": "llama", "vocab_size": 640, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
}  # fmt: skip
RATES = ["--tokens", "60", "--rollout-rate", "60", "--engine-rate", "400", "--train-rate", "9000"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.toml").write_text(
        'name = "one"\nsteps = 2\nmodel.path = "model"\nprompts.source = "lettered_chain_sum"\n'
        'actors.reward = ["last_answer"]\nactors.kv_cache_gib = 0.5\n'
    )
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        ("seed=0", ["memory at its peak, predicted, in GiB:", "learner × 1: host", "KV cache 0.5"]),
        ("model.path=nowhere", ["memory is not predicted: model.path = 'nowhere'"]),
    ],
)
def test_validate_prints_the_memory_beside_the_recipe_or_why_it_is_not_known(
    folder, setting, messages
):
    result = call_main(["validate", "recipe.toml", "--set", setting], folder)
    assert result.returncode == 0
    assert tomllib.loads(result.stdout)["name"] == "one"
    assert [message for message in messages if message not in result.stderr] == []


@pytest.mark.parametrize("command", [["validate"], ["plan", *RATES], ["run"]])
def test_a_run_that_is_too_large_for_its_nodes_is_refused(folder, command, tiny_model):
    name, *options = command
    shutil.copytree(tiny_model, folder / "model", dirs_exist_ok=True)
    small = ["--set", "deploy.node.memory_gib=1"]
    result = call_main([name, "recipe.toml", *options, *small], folder)
    assert result.returncode == 2
    assert result.stdout == "" or name == "run"
    assert "the node has 1.0 GiB of memory, and needs" in result.stderr
    assert not (folder / "runs").exists()


def test_a_plan_has_the_memory_in_bytes(folder):
    result = call_main(["plan", "recipe.toml", "--bounds", "1", *RATES, "--json"], folder)
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]
    roles = {process["role"]: process for process in memory["processes"]}
    assert roles.keys() == {"learner", "actor"}
    assert roles["actor"]["host"]["KV cache"] == 2**29


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_gpu_that_torch_cannot_use_is_named_with_the_driver_that_is_needed(monkeypatch, error):
    def broken(index):
        raise error(
            "The NVIDIA driver on your system is too old (found version 12040).\nUpdate it."
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    with pytest.raises(InputError, match=r"too old \(found version 12040\)\.; .* 580 or newer"):
        memory_of_gpu()
