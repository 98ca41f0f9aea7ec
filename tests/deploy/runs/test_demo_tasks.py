"""The demo of a mix of tasks learns what its recipe promises, in some minutes."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

HEADWAY = Path(sys.executable).parent / "headway"

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1800)]


def run(recipe, folder):
    """Return the summary of a run and its trained rollouts, oldest version first."""
    for command in ("sft", "run"):
        subprocess.run([HEADWAY, command, recipe], cwd=folder, check=True)
    exported = folder / "rollouts.parquet"
    command = [HEADWAY, "inspect", recipe, "--parquet", exported]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in pq.read_table(exported).to_pylist() if row["state"] == "trained"]
    summary = json.loads((folder / "runs" / recipe / "summary.json").read_text())
    assert summary["accounting"]["balanced"]
    assert summary["max_lag_trained"] <= summary["max_staleness"]
    return summary, sorted(rows, key=lambda row: row["trained_version"])


def test_a_mix_of_three_tasks_learns_all_of_them_by_two_rewards(tmp_path):
    """Work is shown more often in each of them, and each is solved more often for it."""
    summary, rows = run("mix", tmp_path)
    first, last = rows[:1024], rows[-1024:]

    def earned(some, part, task):
        parts = [
            dict(row["reward_parts"])[part] for row in some if row["prompt_id"].startswith(task)
        ]
        return statistics.mean(parts)

    for task in ("sum:", "distance:", "twice:"):
        assert earned(last, "regex", task) >= earned(first, "regex", task) + 0.2, task
        assert earned(last, "last_answer", task) >= earned(first, "last_answer", task) + 0.1, task
    sampled = summary["heldout_sampled"]
    assert sampled[-1]["score"] >= sampled[0]["score"] + 0.15
