"""`python -m benchmarks.gpu`: what runs where, the roofline, and a trial on a CPU."""

import ast
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import learner
from benchmarks.gpu.generation import PROMPT, TOKENS, roofline
from benchmarks.harness.record import environment
from benchmarks.harness.synthetic_load import SIZES
from deploy.cli.bench import ROOT
from deploy.runtime.machine import output_of

KERNELS = ("transfers", "attention", "head", "memory", "ipc")
ZERO = ("zero1", "zero2", "zero3")
NEEDED = {"psutil", *(name for part in suite.PARTS.values() for name in part.needs)} - {"pydantic"}
"""Modules that parts or runs need; typer needs pydantic itself."""


def test_what_is_missing_is_named_and_the_learner_needs_no_serving_packages(monkeypatch):
    absent = ["vllm", "ray", "deepspeed"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else name)
    result = {part: suite.missing(part, "cuda") for part in suite.PARTS}
    assert result == {
        **{part: [] for part in ("learner", *KERNELS)},
        **{part: ["vllm"] for part in ("generation", "pause")},
        **{part: ["deepspeed"] for part in ZERO},
    }
    assert suite.missing("pause", "cpu") == ["vllm", "GPU"]
    absent[:] = ["pydantic"]
    monkeypatch.setattr(suite, "entry_points", lambda group: [])
    assert suite.missing("learner", "cuda") == ["pydantic"]
    assert suite.missing("pause", "cuda") == ["pydantic", suite.PLUGIN]


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
    [("kernels", "transfers"), ("learner", "learner"), ("generation", "generation")],
)
def test_a_part_names_what_is_imported_before_it_begins(module, part):
    names = {name.partition(".")[0] for name in imported_modules(f"benchmarks.gpu.{module}", set())}
    own = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "torch" in names
    assert names - own - set(sys.stdlib_module_names) <= set(suite.PARTS[part].needs)


def test_every_part_of_the_plan_fits_into_ten_minutes():
    assert suite.SECONDS < 600
    parts = suite.plan(["0.5b", "1.5b"])
    assert [part for part, _ in parts] == [
        *KERNELS, *ZERO, "learner", "learner", "generation", "generation", "pause",
    ]  # fmt: skip


def test_of_a_part_that_hangs_or_fails_the_figures_are_kept_and_logs_of_libraries_are_not():
    hangs = (
        "import time; print('INFO loading', flush=True); print('[1]'); "
        'print(\'{"packed": 1, "by": 1}\'); print(\'{"by": 2}\', flush=True); time.sleep(60)'
    )
    result = suite.outcome([sys.executable, "-c", hangs], 6.0)
    assert result == {"packed": 1, "by": 2, "failed": "took longer than 6 s"}
    fails = [sys.executable, "-c", "raise SystemExit('no such device')"]
    assert suite.outcome(fails, 30.0)["failed"] == ["no such device"]


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


def figures_of_part(part, *hidden):
    """Return the figures of a part on a CPU, in a process in which a folder hides modules."""
    program = "import sys, runpy; sys.path[:0] = sys.argv.pop(1).split(); "
    program += "runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
    options = ["--part", part, "--device", "cpu", "--sizes", "tiny", "--rounds", "1"]
    command = [sys.executable, "-c", program, " ".join(map(str, hidden)), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return suite.figures(done.stdout.splitlines())


@pytest.mark.slow
def test_the_parts_of_the_learner_run_on_a_cpu_without_serving_packages(tmp_path):
    """The modules that may be missing on a GPU machine are hidden from it."""
    for name in ("vllm", "ray", "deepspeed", "pyarrow", "prometheus_client"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('hidden')\n")
    result = {part: figures_of_part(part, tmp_path) for part in ("learner", *KERNELS)}
    packed, masked = result["learner"]["packed"], result["learner"]["masked"]
    assert "host_of_lists" in packed["shares"]
    assert 0 < packed["utilisation"] < 1
    assert packed["tokens"] == masked["tokens"]
    rows = [result["attention"][f"mean {mean}"] for mean in (250, 1_000, 4_000)]
    assert max(max(row["difference"], row["gradient_difference"]) for row in rows) < 1e-5
    assert result["ipc"]["equal"]


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("part", ZERO)
def test_a_step_of_each_stage_of_zero_is_measured_on_a_cpu(part):
    result = figures_of_part(part)
    assert result["tokens"] == SIZES["tiny"].microbatch_tokens
    assert min(result["step"], result["publish"]) > 0
