"""`python -m benchmarks.gpu`: what runs where, the roofline, and a trial on a CPU."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu.generation import PROMPT, TOKENS, roofline
from benchmarks.training_load import SIZES
from deploy.bench import ROOT


def test_the_learner_and_packing_need_nothing_of_what_serves(monkeypatch):
    def find_spec(name):
        return None if name in ("vllm", "ray", "deepspeed") else name

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    found = {part: suite.missing(part, "cuda") for part in suite.NEEDS}
    assert found == {
        "packing": [], "learner": [], "lag": [], "generation": ["vllm"], "pause": ["vllm"],
    }  # fmt: skip
    assert suite.missing("pause", "cpu") == ["vllm", "GPU"]


def test_every_part_of_the_plan_fits_into_eight_minutes():
    assert suite.SECONDS < 480
    parts = suite.plan(["0.5b", "1.5b"])
    assert [part for part, _ in parts] == [
        "packing", "learner", "learner", "lag", "generation", "generation", "pause",
    ]  # fmt: skip


def test_a_part_that_hangs_or_fails_costs_the_others_nothing():
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert suite.outcome(hangs, "learner", 1.0) == {"failed": "took longer than 1 s"}
    fails = [sys.executable, "-c", "raise SystemExit('no such device')"]
    assert suite.outcome(fails, "learner", 30.0)["failed"] == ["no such device"]


def test_the_roofline_is_weights_once_a_step_and_keys_and_values_of_each_sequence():
    size = SIZES["tiny"]
    kept = 2 * size.layers * size.kv_heads * size.head_size * 2 * (PROMPT + TOKENS / 2)
    assert roofline(size, 1000, 1e6, 1) == pytest.approx(1e6 / (2000 + kept))
    assert roofline(size, 1000, 1e6, 4) == pytest.approx(4e6 / (2000 + 4 * kept))


@pytest.mark.slow
def test_the_way_of_the_learner_can_be_gone_on_a_cpu_without_what_serves(tmp_path):
    """The modules that may be missing on a GPU machine are hidden from it."""
    for name in ("vllm", "ray", "deepspeed", "pyarrow", "prometheus_client"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('hidden')\n")
    hidden = "import sys; sys.path.insert(0, sys.argv.pop(1)); import runpy; "
    program = hidden + "runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
    for part in ("packing", "learner", "lag"):
        command = [sys.executable, "-c", program, str(tmp_path), "--part", part]
        done = subprocess.run(
            [*command, "--device", "cpu", "--sizes", "tiny", "--rounds", "1"],
            cwd=ROOT, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        if part == "learner":
            assert 0 < found["packed"]["utilisation"] < 1
            assert found["packed"]["tokens"] == found["masked"]["tokens"]
        if part == "lag":
            assert [row["lag"] for row in found["by_lag"]] == list(range(9))
            assert found["by_lag"][0]["ess"] == pytest.approx(1.0)
            assert all(0 < row["ess"] <= 1.0001 for row in found["by_lag"])
