"""Every example does what its README tells to type, and learns as much as that says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.config.loader import load_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/README.md"))
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
}
SECONDS = 1200
"""Deadline of one command."""

slow = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(3600)]


def play(name, folder):
    """Type the commands of an example's README in a copy of its folder; return that folder."""
    here = folder / name
    shutil.copytree(EXAMPLES / name, here, ignore=shutil.ignore_patterns("runs", "model", "study"))
    readme = (here / "README.md").read_text()
    for command in re.findall(r"^    ((?:headway|python) .*?)(?: +#.*)?$", readme, re.MULTILINE):
        result = subprocess.run(
            ["bash", "-c", command], cwd=here, env=ENVIRONMENT, capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return here


def summary_of(folder, name):
    """Return the summary of a run, which has to be a whole one within its bound."""
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", summary["steps"])
    assert summary["max_lag_trained"] <= summary["max_staleness"]
    assert summary["accounting"]["balanced"]
    return summary


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_example_has_a_recipe_scores_and_a_picture(folder, monkeypatch):
    monkeypatch.chdir(folder)
    [recipe] = folder.glob("*.toml")
    load_recipe(str(recipe), [])
    readme = (folder / "README.md").read_text()
    assert f"{recipe.name}" in readme
    assert "before" in readme
    assert re.search(r"!\[[^\]]+\]\((?:curve|staleness)\.svg\)", readme)


@pytest.mark.parametrize(
    ("name", "run", "before", "after"),
    [
        pytest.param("chat_task", "sorting", 0.5, 0.75, marks=slow),
        pytest.param("tools", "prices", 0.4, 0.75, marks=slow),
    ],
)
def test_an_example_learns(name, run, before, after, tmp_path):
    """Sampled held-out scores, as its README shows them with some room for other seeds."""
    sampled = summary_of(play(name, tmp_path), run)["heldout_sampled"]
    assert sampled[0]["score"] <= before
    assert sampled[-1]["score"] >= after
