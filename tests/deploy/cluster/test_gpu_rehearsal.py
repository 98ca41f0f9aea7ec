"""The shipped recipes for GPUs at tiny size, with GPUs that Ray counts and nobody uses.

Everything but the devices is what the recipes say; that for eight GPUs has its four engines of vLLM
and four ranks of the learner, in bfloat16 with ZeRO 1, and the others two of each at most.
"""

import json
import os
import signal
from contextlib import suppress

import psutil
import pytest
from ray.cluster_utils import Cluster

from learner.model.tiny_tokenizer import tiny_tokenizer
from tests.deploy.conftest import REWARD, Headway, read_rows
from tests.deploy.running import ENGINE, WAIT_SECONDS
from tests.waiting import until

pytestmark = [
    pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.deepspeed,
    pytest.mark.timeout(1800),
]  # fmt: skip
SIZES = {
    "model.path": "model", "prompts.groups_per_batch": 4, "prompts.group_size": 4,
    "heldout.size": 4, "actors.max_new_tokens": 16, "actors.max_model_len": 64,
    "actors.max_concurrent_rollouts": 16, "actors.kv_cache_gib": 0.05,
    "learner.microbatch_tokens": 512, "learner.checkpoint_every": 2,
    "actors.reward": '["varied:score"]', "actors.enforce_eager": "true",
    "learner.threads": 1, "learner.compile": "false", "deploy.metrics": "false",
}  # fmt: skip
QWEN = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """Yield the command on a cluster of two nodes of eight GPUs, with a model and problems."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    headway = Headway(tmp_path_factory.mktemp("rehearsal"))
    Qwen2ForCausalLM(Qwen2Config(**QWEN)).save_pretrained(headway.folder / "model")
    tiny_tokenizer("0123456789+=-", 64).save_pretrained(headway.folder / "model")
    (headway.folder / "varied.py").write_text(REWARD)
    (headway.folder / "data").mkdir()
    for name in ("train", "test"):
        problems = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(100)]
        lines = "".join(json.dumps(problem) + "\n" for problem in problems)
        (headway.folder / "data" / f"gsm8k_{name}.jsonl").write_text(lines)
    cluster = Cluster()
    try:
        for pool in ("learner", "rollouts"):
            cluster.add_node(num_cpus=16, num_gpus=8, labels={"pool": pool})
        headway.cluster = cluster.address
        yield headway
    finally:
        cluster.shutdown()


def start(user, name, *, recipe="gsm8k_qwen_8gpu", **settings):
    folders = {"deploy.runs_dir": "runs", "deploy.checkpoint_dir": user.folder / "shared"}
    given = {**SIZES, **folders, "name": name, "deploy.ray_address": user.cluster, **settings}
    parts = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    return user.start_plain("run", recipe, *parts)


def ended(process):
    output, _ = process.communicate(timeout=900)
    return output


def first_engine():
    """Return the process of the first engine of this test's cluster, when there is one."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(ENGINE):
                return process
    return None


def test_the_recipe_trains_is_interrupted_and_resumes(user):
    process = start(user, "whole", steps=6)
    user.wait_for_batches("whole", 3, process, seconds=900)
    os.killpg(process.pid, signal.SIGINT)
    output = ended(process)
    assert process.returncode == 130, output
    trained = len(read_rows(user.run_folder("whole") / "metrics.jsonl"))
    assert 3 <= trained < 6
    resumed = user("resume", "whole", timeout=900)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    accounts = user.accounting("whole")
    assert (accounts["balanced"], accounts["trained"], accounts["trained_twice"]) == (True, 24, 0)
    rows = read_rows(user.run_folder("whole") / "metrics.jsonl")
    assert [row["version"] for row in rows] == [*range(6)]
    assert len({row["weights_checksum"] for row in rows}) == 6


def test_a_run_goes_on_with_one_engine_fewer(user):
    process = start(user, "fewer", steps=2, **{"actors.min_count": 3, "deploy.max_restarts": 0})
    until(first_engine, WAIT_SECONDS, process=process).kill()
    output = ended(process)
    assert process.returncode == 0, output
    assert "given up" in output
    assert user.accounting("fewer")["trained"] == 8


TWO = {"actors.count": 2, "learner.ranks": 2}
PARALLEL = {
    "actors.count": 1, "learner.ranks": 2, "actors.tensor_parallel_size": 2, "actors.gpus": 2,
    "deploy.environment.VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "weight_sync.transport": "object_store",
}  # fmt: skip
"""vLLM's build for CPUs else binds each worker of an engine to a NUMA node of its own."""


@pytest.mark.parametrize(
    ("recipe", "counts"),
    [
        ("gsm8k_qwen_1gpu", {}),
        ("gsm8k_qwen7b_8gpu", TWO),
        ("gsm8k_qwen7b_2nodes", TWO),
        ("gsm8k_qwen32b_8nodes", PARALLEL),
    ],
)
def test_the_other_recipes_train(user, recipe, counts):
    process = start(user, recipe, recipe=recipe, steps=2, **counts)
    output = ended(process)
    assert process.returncode == 0, output
    accounts = user.accounting(recipe)
    assert (accounts["balanced"], accounts["trained"]) == (True, 8)
