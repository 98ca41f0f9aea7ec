"""The honest demo, as the watch for reward hacking sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEADWAY = Path(sys.executable).parent / "headway"
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(4 * 3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hacking")
    subprocess.run([HEADWAY, "sft", "demo"], cwd=folder, check=True)
    return folder


def run(folder, name, seed, *settings):
    """Return the exit code of the demo with a gold reward, its output, and its batches."""
    chosen = [f"name={name}-{seed}", "sft.name=demo", f"seed={seed}", "actors.gold.share=1.0"]
    chosen += ["actors.gold.on_hacking=stop", "actors.heldout_reward=['last_answer']", *settings]
    command = [HEADWAY, "run", "demo", *(x for setting in chosen for x in ("--set", setting))]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    lines = (folder / "runs" / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


@pytest.mark.parametrize("seed", range(10))
def test_the_honest_demo_is_never_called_hacked(folder, seed):
    code, output, batches = run(folder, "honest", seed, "actors.gold.reward=['numeric_match']")
    assert code == 0, output
    assert "the reward is hacked" not in output
    assert len(batches) == 80
