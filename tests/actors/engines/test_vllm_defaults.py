"""Memory that an engine takes of its machine, and messages about one that did not start."""

import asyncio
import errno
import json
import re
import subprocess
import sys
from functools import partial

import pytest
from fakes import engine_spec
from pydantic import ValidationError

from actors.config import ActorsConfig
from actors.engines.vllm import VllmEngine
from actors.engines.vllm_arguments import CPU_BLOCK_TOKENS, kv_cache_bytes, process_variables
from actors.engines.vllm_output import cause_in, memory_problem
from actors.errors import EngineDied
from headway.errors import InputError

TOKEN = 2 * 4 * 2 * 16 * 4
"""Bytes of a token: keys and values, 4 layers, 2 heads of 16 numbers in float32."""
BLOCK = CPU_BLOCK_TOKENS * TOKEN


@pytest.fixture
def spec(tmp_path):
    """Return a function that describes an engine with these settings."""
    sizes = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    description = {"model_type": "qwen3", "dtype": "float32", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(description))

    return partial(engine_spec, tmp_path)


@pytest.mark.parametrize(
    ("settings", "longest", "free", "expected"),
    [
        ({"max_concurrent_rollouts": 10}, 64, 2**40, (10 * 2 + 1) * BLOCK),
        (
            {"max_concurrent_rollouts": 10, "dtype": "bfloat16"},
            64,
            2**40,
            (10 * 2 + 1) * BLOCK // 2,
        ),
        ({"count": 1}, 4096, 2**30, 2**28),
        ({"count": 4}, 4096, 2**30, 2**26),
        ({"kv_cache_gib": 0.25}, 4096, 2**20, 2**28),
    ],
    ids=["all at full length", "half as wide", "a quarter", "shared", "the recipe's"],
)
def test_a_cache_holds_all_rollouts_or_a_quarter_of_the_free_memory(
    spec, settings, longest, free, expected
):
    assert kv_cache_bytes(spec(**settings), longest, free) == expected


@pytest.mark.parametrize(
    ("cores", "workers", "bound"),
    [("0-3", 1, "0,1,2,3"), ("0-3", 2, "0,1|2,3"), ("0-2", 2, "0|1,2"), ("5", 2, "5|5")],
)
def test_workers_of_an_engine_share_out_its_cores_and_too_few_of_them(spec, cores, workers, bound):
    engine = spec(cores=(cores,), tensor_parallel_size=workers)
    assert process_variables(engine)["VLLM_CPU_OMP_THREADS_BIND"] == bound


def test_a_single_rollout_may_take_more_and_not_more_than_half(spec):
    engine, one = spec(count=2), (512 // CPU_BLOCK_TOKENS + 1) * BLOCK
    assert kv_cache_bytes(engine, 512, 4 * one) == one
    with pytest.raises(InputError, match=r"max_model_len = 512 tokens needs .*each of 2 engine"):
        kv_cache_bytes(engine, 512, 4 * one - 4)


def test_an_engine_on_a_share_of_a_gpu_takes_no_more_memory_than_that():
    assert ActorsConfig().gpu_memory_share == 0.9
    assert ActorsConfig(gpus=0.5).gpu_memory_share == pytest.approx(0.45)
    assert ActorsConfig(gpus=0.5, gpu_memory_utilization=0.5).gpu_memory_share == 0.5
    with pytest.raises(ValidationError, match=r"= 0.9 must be at most actors.gpus = 0.5"):
        ActorsConfig(gpus=0.5, gpu_memory_utilization=0.9)


@pytest.mark.parametrize(
    ("text", "cpu", "message", "permanent"),
    [
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 "
            "GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB). "
            "Based on the available memory, the estimated maximum model length is 7264. Try",
            True,
            "one rollout of actors.max_model_len = 40960 tokens needs 5.62 GiB of KV cache, and "
            "the engine has 1.0 GiB; lower actors.max_model_len, or raise actors.kv_cache_gib",
            True,
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine",
            False,
            "there is no memory for the KV cache of one block of tokens; raise ",
            True,
        ),
        (
            "ValueError: Available memory on node 0 (3.2/23.5 GiB) on kv cache allocation is less "
            "than requested memory for kv (8.0 GiB). Decrease --kv-cache-memory-bytes,",
            True,
            "the KV cache of an engine takes 8.0 GiB, and 3.2 of 23.5 GiB of memory are free; "
            "lower actors.kv_cache_gib or actors.count",
            False,
        ),
        (
            "ValueError: Available memory on node 0 (3.2/23.5 GiB) on kv cache allocation is less "
            "than requested memory for kv (64.0 GiB). Decrease --kv-cache-memory-bytes,",
            True,
            "the KV cache of an engine takes 64.0 GiB",
            True,
        ),
        (
            "ValueError: Free memory on device cuda:0 (30.1/79.2 GiB) on startup is less than "
            "desired GPU memory utilization (0.9, 71.3 GiB). Decrease GPU memory",
            False,
            "actors.gpu_memory_utilization = 0.9 wants 71.3 GiB, and 30.1 of 79.2 GiB are free",
            False,
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            False,
            "there is not enough memory for the model; lower actors.gpu_memory_utilization or "
            "actors.max_concurrent_rollouts, or take a smaller actors.dtype or model, or raise",
            False,
        ),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
            "proc(s): {'EngineCore': -9}",
            True,
            "the system killed a process of vLLM, most likely since memory ran out; lower "
            "actors.kv_cache_gib or actors.count",
            False,
        ),
    ],
)
def test_what_vllm_says_of_memory_is_said_in_the_keys_of_a_recipe(text, cpu, message, permanent):
    problem = memory_problem(f"(EngineCore pid=7) ERROR\n{text}\nProcess EngineCore:\n", cpu=cpu)
    assert problem is not None
    assert problem[0].startswith(message)
    assert "-memory" not in problem[0]
    assert problem[1] is permanent


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EMFILE, "Too many open files"), EngineDied),
        (OSError(errno.ENOSPC, "No space left on device"), EngineDied),
        (OSError(errno.EADDRINUSE, "Address already in use"), EngineDied),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), InputError),
        (PermissionError(errno.EACCES, "Permission denied"), InputError),
        (OSError("it is not a local folder and is not a valid model identifier"), InputError),
        (ValueError("model type `abacus` is not known"), InputError),
    ],
    ids=str,
)
def test_what_the_system_lacks_as_an_engine_starts_is_no_bad_input(spec, monkeypatch, error, kind):
    from vllm.v1.engine.async_llm import AsyncLLM

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("actors.engines.vllm.engine_arguments", lambda *_: {})
    monkeypatch.setattr(AsyncLLM, "from_engine_args", fail)
    with pytest.raises(kind, match=re.escape(str(error))):
        asyncio.run(VllmEngine(spec(), 64).start())


def test_the_cause_of_another_failure_is_the_first_error_that_was_printed():
    printed = (
        "(EngineCore pid=7) ERROR 11-23 [core.py:12] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-23 [core.py:12]   File "model.py", line 3, in load\n'
        "(EngineCore pid=7) ERROR 11-23 [core.py:12] ValueError: no module 'model.layers.7'\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert memory_problem(printed, cpu=True) is None
    assert cause_in(printed) == "ValueError: no module 'model.layers.7'"
    assert cause_in("loading\n") is None


CHILDREN = """
import subprocess, sys, pathlib
from actors.engines.vllm_output import captured
log = pathlib.Path(sys.argv[1]) if sys.argv[1] else None
with captured(log) as printed:
    print("own")
    child = subprocess.Popen(["sh", "-c", "echo out; echo err >&2; read line; echo $line"],
                             stdin=subprocess.PIPE)
    while printed().count("\\n") < 2 + (log is not None):
        pass
print("terminal", flush=True)
child.communicate(b"later\\n")
"""


def test_processes_that_are_started_write_to_the_log_also_later(tmp_path):
    log = tmp_path / "log"
    ended = subprocess.run(
        [sys.executable, "-c", CHILDREN, log], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("terminal\n", "")
    assert sorted(log.read_text().split()) == ["err", "later", "out", "own"]


def test_output_that_goes_to_files_is_read_there_and_any_other_is_not(tmp_path):
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        program = [sys.executable, "-c", CHILDREN, ""]
        subprocess.run(program, stdout=out, stderr=err, check=True, timeout=60)
    assert sorted((tmp_path / "out").read_text().split()) == ["later", "out", "own", "terminal"]
    program = (
        "from actors.engines.vllm_output import captured\n"
        "with captured(None) as printed:\n"
        "    print('x', flush=True)\n"
        "    assert printed() == ''\n"
    )
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert piped.stdout == b"x\n"


def test_the_last_words_of_an_engine_are_told_where_it_had_any(tmp_path):
    fatal = "EngineCore encountered a fatal error.\nTraceback:\nRuntimeError: no kernel\n"
    ends = "async_llm: output failed\nEngineDeadError: see above\n"
    program = "import sys; from actors.engines.vllm_output import died; sys.stderr.write(died())"
    for printed, told in ((fatal + ends, ": RuntimeError: no kernel"), (ends, "")):
        (tmp_path / "out").write_text("ValueError: before\n" + printed)
        with (tmp_path / "out").open("a") as out:
            ended = subprocess.run(
                [sys.executable, "-c", program], stdout=out, stderr=subprocess.PIPE, text=True,
                check=True, timeout=60,
            )  # fmt: skip
        assert ended.stderr == f"a process of the vLLM engine is gone{told}"
