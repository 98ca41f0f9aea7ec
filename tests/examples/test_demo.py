"""The demo learns what the README promises, for each of its seeds; five minutes a seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEADWAY = Path(sys.executable).parent / "headway"

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]


def check(summary):
    """Check the promises of the demo against the summary of a run."""
    greedy, sampled = summary["heldout"], summary["heldout_sampled"]
    assert (greedy[0]["size"], greedy[1]["size"], greedy[-1]["size"]) == (2000, 500, 2000)
    assert greedy[0]["score"] <= 0.6
    assert greedy[-1]["score"] >= 0.88
    assert sampled[-1]["score"] >= 0.80
    assert summary["max_lag_trained"] <= summary["max_staleness"] == 2
    assert summary["multi_version_rollouts"] > 0
    assert summary["mismatch"]["fresh"]["mean_abs_logprob_difference"] < 1e-3
    assert summary["mismatch"]["crossed"]["tokens"] > 0
    assert summary["overlap"]["learner_ahead"] > 0.5 * summary["overlap"]["updates"]
    assert summary["accounting"]["balanced"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_within_the_bound(tmp_path, seed):
    settings = ["--set", f"seed={seed}", "--set", f"name=demo-{seed}"]
    for command in ("sft", "run"):
        subprocess.run([HEADWAY, command, "demo", *settings], cwd=tmp_path, check=True)
    check(json.loads((tmp_path / "runs" / f"demo-{seed}" / "summary.json").read_text()))
