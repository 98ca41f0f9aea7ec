"""Every example does what its README tells to type, and learns as much as that says."""

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.harness.figures import BLOCK
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


def play(name, folder, most=None):
    """Type the first `most` commands of an example's README in a copy of it; return that folder.

    Those of blocks of figures are left out.
    """
    here = folder / name
    shutil.copytree(EXAMPLES / name, here, ignore=shutil.ignore_patterns("runs", "model", "study"))
    readme = BLOCK.sub("", (here / "README.md").read_text())
    commands = re.findall(r"^    ((?:headway|python) .*?)(?: +#.*)?$", readme, re.MULTILINE)
    for command in commands[:most]:
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
    assert re.search(r"!\[[^\]]+\]\([\w./]*\.svg\)", readme)


@pytest.mark.parametrize(
    ("name", "run", "sampling", "before", "after"),
    [
        pytest.param("chat_task", "sorting", "heldout_sampled", 0.5, 0.75, marks=slow),
        pytest.param("tools", "prices", "heldout_sampled", 0.4, 0.75, marks=slow),
        pytest.param("agent", "agent", "heldout_sampled", 0.45, 0.55, marks=slow),
        pytest.param("reward_model", "preferences", "heldout", 0.45, 0.55, marks=slow),
    ],
)
def test_an_example_learns(name, run, sampling, before, after, tmp_path):
    """The scores of its README, with some room for other machines."""
    scores = summary_of(play(name, tmp_path), run)[sampling]
    assert scores[0]["score"] <= before
    assert scores[-1]["score"] >= after


@pytest.fixture
def code_table(monkeypatch):
    """Return the module of the study's task."""
    monkeypatch.syspath_prepend(EXAMPLES / "staleness")
    yield importlib.import_module("code_table")
    del sys.modules["code_table"]


def test_demonstrations_of_the_study_do_not_tell_the_code(code_table):
    """The right digit is shown as often as three others, and no held-out text is shown."""
    source = code_table.CodeTable(options={}, seed=0, heldout_size=100)
    right, letters, texts = 0, 0, {prompt.text for prompt in source.next(1000)}
    for prompt, completion in islice(source.demonstrations(), 1000):
        assert completion[::2] == prompt[:-1]
        shown = zip(completion[::2], completion[1::2], strict=True)
        right += sum(code_table.CANDIDATES[letter][0] == digit for letter, digit in shown)
        letters += len(prompt) - 1
        texts.add(prompt)
    assert 0.23 < right / letters < 0.27
    heldout = code_table.CodeTable(options={}, seed=0, split="heldout", heldout_size=100)
    assert not {prompt.text for prompt in heldout.next(100)} & texts


def test_answers_of_the_study_have_a_long_tail(code_table):
    lengths = sorted(len(code_table.problem_at("heldout", n).answer) for n in range(1000))
    assert lengths[950] >= 3 * lengths[500]


@pytest.mark.parametrize(
    ("completion", "reason", "reward"),
    [
        ("a1b2", "stop", 1.0),
        ("a1b3", "stop", 0.5),
        ("b2a1", "stop", 0.0),
        ("a1", "stop", 0.5),
        ("a1b2c3d4", "stop", 0.5),
        ("a1b2", "length", 0.0),
    ],
)
def test_the_reward_of_the_study_is_the_share_of_right_letters(
    code_table, completion, reason, reward
):
    metadata = {"headway:finish_reason": reason}
    assert asyncio.run(code_table.share("ab=", completion, "a1b2", metadata)) == reward


@pytest.mark.parametrize("example", [pytest.param("staleness", marks=slow)])
def test_the_study_compares_bounds_and_corrections(example, tmp_path):
    study = play(example, tmp_path, most=2) / "study"
    runs = json.loads((study / "staleness.json").read_text())["arms"]
    arms = {(run["name"], run["kind"]): run for run in runs}
    assert set(arms) == {("0", "cispo"), ("8", "cispo"), ("8", "none")}
    zero, eight, uncorrected = arms.values()
    assert zero["lag_max"] == 0 < eight["lag_max"] <= 8
    assert zero["samples_per_second"] < eight["samples_per_second"]
    assert uncorrected["score"] < min(zero["score"], eight["score"])
    assert (study / "staleness_throughput.svg").stat().st_size > 10_000
