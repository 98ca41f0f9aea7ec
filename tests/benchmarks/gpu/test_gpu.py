"""`python -m benchmarks.gpu`: what runs where, the roofline, and a trial on a CPU."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import requires

import pytest
import torch

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import learner
from benchmarks.gpu.generation import PROMPT, TOKENS, roofline
from benchmarks.gpu.worker import Worker
from benchmarks.harness.record import environment
from benchmarks.harness.synthetic_load import SIZES
from deploy.cli.bench import ROOT
from deploy.runtime.machine import output_of

ZERO = ("zero1", "compiled", "zero2", "zero3")
SERVING = ("generation", "pause")
LEARNER = [name for name in suite.PARTS if name not in (*ZERO, *SERVING)]
NEEDED = {"psutil", *(name for part in suite.PARTS.values() for name in part.needs)} - {"pydantic"}
"""Modules that parts or runs need; typer needs pydantic itself."""


def test_what_is_missing_is_named_and_the_learner_needs_no_serving_packages(monkeypatch, tmp_path):
    absent = ["vllm", "ray", "hjson"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else name)
    result = {part: suite.missing(part, "cuda") for part in suite.PARTS}
    assert result == {
        **{part: [] for part in LEARNER},
        **{part: ["vllm"] for part in SERVING},
        **{part: ["hjson"] for part in ZERO},
    }
    assert suite.missing("pause", "cpu") == ["vllm", "GPU"]
    absent[:] = ["pydantic"]
    monkeypatch.setattr(suite, "entry_points", lambda group: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert suite.missing("learner", "cuda") == ["pydantic"]
    assert suite.missing("sums", "cpu") == ["pydantic", suite.COMPILER, suite.HEADER]
    without = ["pydantic", suite.COMPILER, suite.HEADER, suite.PLUGIN]
    assert suite.missing("pause", "cuda") == without


def test_deepspeed_is_named_with_all_that_it_requires():
    always = [text for text in requires("deepspeed") if "extra ==" not in text]
    distributions = {re.match(r"[\w-]+", text)[0] for text in always}
    assert {"hjson", "einops"} <= distributions
    assert distributions - {"py-cpuinfo"} | {"cpuinfo"} <= set(suite.PARTS["zero1"].needs)


def imported_modules(module, known):
    """Add what a module of this program imports as it is loaded, without what functions import."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module in known or not path.exists():
        return known | {module}
    known = known | {module}
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):
                known = imported_modules(".".join(parts[:depth]), known)
    return known


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("kernels", "transfers"),
        ("learner", "learner"),
        ("swap", "graph"),
        ("sharing", "sharing"),
        ("generation", "generation"),
    ],
)
def test_a_part_names_what_is_imported_before_it_begins(module, part):
    names = {name.partition(".")[0] for name in imported_modules(f"benchmarks.gpu.{module}", set())}
    own = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "torch" in names
    assert names - own - set(sys.stdlib_module_names) <= set(suite.PARTS[part].needs)


def test_the_central_claims_come_first_and_sizes_are_those_of_each_part():
    assert suite.SECONDS < 600
    assert suite.plan(suite.GpuOptions()) == [
        ("imports", ""), ("graph", "1.5b"), ("zero1", "0.5b"), ("compiled", "0.5b"),
        ("memory", "1.5b"), ("learner", "0.5b"), ("learner", "1.5b"), ("head", "1.5b"),
        ("sums", "1.5b"), ("transfers", "1.5b"), ("attention", "1.5b"), ("sharing", ""),
        ("ipc", ""), ("zero2", "0.5b"), ("zero3", "0.5b"), ("generation", "0.5b"),
        ("generation", "1.5b"), ("pause", "0.5b"),
    ]  # fmt: skip
    options = suite.GpuOptions(parts=("ipc", "graph"), sizes=("0.5b",))
    assert suite.plan(options) == [("graph", "0.5b"), ("ipc", "")]


@pytest.mark.slow
def test_of_a_part_that_hangs_or_fails_the_figures_are_kept_and_the_next_one_runs():
    worker = Worker()

    def outcome(part, seconds=200.0):
        figures = worker.outcome((f"tests.benchmarks.gpu.parts:{part}", "tiny", "cpu", 3), seconds)
        assert figures.pop("part_seconds", 0) < seconds
        return figures

    try:
        assert outcome("ends") == {"a": 1, "b": 3}
        assert outcome("hangs", 2.0) == {"a": 1, "failed": ["took longer than 2 s"]}
        assert outcome("fails") == {"a": 1, "failed": ["no such device"]}
        assert outcome("ends") == {"a": 1, "b": 3}
    finally:
        worker.close()


def test_each_part_is_yielded_as_it_ends_and_what_failed_or_is_false_is_a_miss(monkeypatch):
    class Recited:
        answers = iter([{"claims": {"it holds": True, "it does not": False}}, {"failed": ["why"]}])

        def outcome(self, call, seconds):
            return {"call": call, "seconds": seconds} | next(self.answers)

        def close(self):
            pass

    monkeypatch.setattr(suite, "Worker", Recited)
    options = suite.GpuOptions(parts=("head", "ipc", "pause"), device="cpu", sizes=("demo",))
    counts = []
    for record in suite.measure(options):
        counts.append(len(record["parts"]))
    parts = record["parts"]
    assert counts == [1, 2, 3]
    assert parts["head demo"]["call"] == ("benchmarks.gpu.kernels:head", "demo", "cpu", 5)
    assert parts["head demo"]["seconds"] == suite.PARTS["head"].seconds
    assert "GPU" in parts["pause demo"]["not_run"]
    assert suite.misses(record) == ["ipc failed", "head demo: it does not"]


def test_the_suite_itself_starts_with_typer_alone():
    """So that it can say what is missing."""
    program = (
        "import sys, runpy\n"
        f"sys.modules.update(dict.fromkeys({sorted(NEEDED)}))\n"
        "sys.argv = ['gpu', '--help']\n"
        "runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "--sizes" in done.stdout) == (0, True), done.stderr


@pytest.mark.slow
def test_attention_without_enough_memory_is_stored_and_the_other_is_measured(monkeypatch):
    make = learner.make

    def too_large(*arguments, packed):
        if packed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")
        return make(*arguments, packed=packed)

    monkeypatch.setattr(learner, "make", too_large)
    result = {}
    for figures in learner.utilisation("tiny", torch.device("cpu"), rounds=1):
        result |= figures
    assert result["packed"] == {"failed": "CUDA out of memory. Tried to allocate 2 GiB."}
    assert "host" in result["masked"]["shares"]


def test_a_deep_model_of_bfloat16_attends_sequence_by_sequence(monkeypatch):
    """Ways to attend are compared in float32, where least is taken for rounding."""
    compared = []

    def attend_packed(model):
        compared.append(model.dtype)
        return packed(model)

    packed = learner.attend_packed
    monkeypatch.setattr(learner, "attend_packed", attend_packed)
    size = replace(SIZES["tiny"], layers=28, dtype="bfloat16")
    engine = learner.make(size, torch.device("cpu"), packed=True)
    model = engine.policy.model
    assert compared == [torch.float32]
    assert (model.config._attn_implementation, model.dtype) == ("headway_packed", torch.bfloat16)


@pytest.mark.parametrize(
    ("programs", "variable", "commit", "gpus"),
    [
        ({}, None, None, []),
        ({"git": "exit 128", "nvidia-smi": "echo no driver; exit 9"}, "abc", "abc", []),
        ({"nvidia-smi": "echo NVIDIA H100, 580.1"}, "abc", "abc", ["NVIDIA H100, 580.1"]),
    ],
    ids=["no programs", "programs that fail", "a GPU"],
)
def test_a_record_without_git_holds_the_rest_and_names_gpus(
    programs, variable, commit, gpus, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("HEADWAY_COMMIT", raising=False)
    if variable:
        monkeypatch.setenv("HEADWAY_COMMIT", variable)
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    result = environment()
    assert (result["commit"], result["uncommitted_changes"]) == (commit, None)
    assert result["machine"]["gpus"] == gpus


def test_a_program_that_hangs_leaves_its_part_of_a_record_out():
    assert output_of("sleep", "60", seconds=0.1) is None


def test_the_roofline_is_weights_once_a_step_and_keys_and_values_of_each_sequence():
    size = SIZES["tiny"]
    kept = 2 * size.layers * size.kv_heads * size.head_size * 2 * (PROMPT + TOKENS / 2)
    assert roofline(size, 1000, 1e6, 1) == pytest.approx(1e6 / (2000 + kept))
    assert roofline(size, 1000, 1e6, 4) == pytest.approx(4e6 / (2000 + 4 * kept))


@pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", "tiny", marks=pytest.mark.slow),
        pytest.param("cuda", "0.5b", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "part",
    [
        "graph",
        "transfers",
        "attention",
        "head",
        "ipc",
        pytest.param("sums", marks=pytest.mark.slow),
    ],
)
def test_what_a_part_measures_is_right(part, device, size):
    """Run parts that hold the central claims about GPUs, on a CPU with the same code.

    A captured graph replayed after a swap, the digest of a snapshot that a step follows, varlen
    attention with gradients and windows, the head in float32, handles above 1 GiB, and compiled
    sums over the words.
    """
    module, _, function = suite.PARTS[part].work.partition(":")
    work = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    result = {}
    with torch._dynamo.config.patch(disable=False):  # as DeepSpeed's engine sets it on CPUs
        for figures in work(size, torch.device(device), 1):
            result |= figures
    assert result["claims"]
    assert not [claim for claim, holds in result["claims"].items() if not holds], result


@pytest.mark.slow
@pytest.mark.deepspeed
def test_the_whole_list_runs_on_a_cpu_without_serving_packages(tmp_path):
    """The modules that may be missing on a GPU machine are hidden from it."""
    hidden, file = tmp_path / "hidden", tmp_path / "gpu.json"
    for name in ("vllm", "ray", "pyarrow", "prometheus_client"):
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text("raise ImportError('hidden')\n")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--sizes", "tiny"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--output", str(file)], cwd=ROOT, capture_output=True,
        text=True, timeout=280, env=os.environ | {"PYTHONPATH": f"{hidden}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text())["parts"]
    assert [name for name, part in parts.items() if "not_run" in part] == [
        "generation tiny",
        "pause tiny",
    ]
    assert all(part["claims"] for part in parts.values() if "not_run" not in part)
    assert "host_of_lists" in parts["learner tiny"]["packed"]["shares"]
    assert parts["zero1 tiny"]["tokens"] == SIZES["tiny"].microbatch_tokens
    assert sum(part.get("part_seconds", 0) for part in parts.values()) < 240
