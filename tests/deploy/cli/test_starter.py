"""`headway init`: files of a task that can be checked, tried and trained as they are."""

import json
import re
import tomllib

import pytest

from deploy.cli.recipes import NAMES
from tests.deploy.conftest import Headway, call_main

SCRIPTED = ("--set", "actors.engine=scripted")
SHORT = (*SCRIPTED, "--set", "steps=3", "--set", "heldout.size=8")


@pytest.fixture
def task(tmp_path):
    """Provide a folder with the files."""
    result = call_main(["init", "task"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "cd task" in result.stdout
    return tmp_path / "task"


def test_the_files_are_written_and_never_over_others(task):
    assert sorted(path.name for path in task.iterdir()) == sorted(NAMES)
    (task / "my_task.py").unlink()
    result = call_main(["init"], task)
    assert (result.returncode, "my_task.toml exists" in result.stderr) == (2, True)
    assert not (task / "my_task.py").exists()


def test_every_section_of_the_recipe_has_a_comment(task):
    top, *sections = re.split(r"^(?=\[)", (task / "my_task.toml").read_text(), flags=re.MULTILINE)
    assert len(sections) > 6
    assert [text for text in (top, *sections) if " # " not in text and "\n# " not in text] == []


def test_the_recipe_is_valid_strictly(task):
    result = call_main(["validate", "my_task.toml", "--strict"], task)
    assert result.returncode == 0, result.stderr
    assert tomllib.loads(result.stdout)["actors"]["reward"] == ["my_task:score"]


def test_right_answers_are_rewarded_and_demonstrations_guess(task, monkeypatch):
    monkeypatch.syspath_prepend(task)
    import my_task

    source = my_task.LastLetter(options={}, seed=0, heldout_size=50)
    prompts = source.next(200)
    assert all(my_task.score(p.text, p.text[-2], p.answer, {}) == 1.0 for p in prompts)
    assert my_task.score("ab=", "a", "b", {}) == 0.0
    for text, reward in (("B.", 1.0), ("The last letter is b", 1.0), ("ab", 0.0), ("b, or c", 0.0)):
        assert my_task.score("ab=", text, "b", {}) == reward
    heldout = my_task.LastLetter(options={}, seed=1, split="heldout", heldout_size=50).next(50)
    assert not {p.text for p in heldout} & {p.text for p in prompts}
    shown = source.demonstrations()
    right = sum(text[-2] == guess for text, guess in (next(shown) for _ in range(500)))
    assert 0.15 < right / 500 < 0.5


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_the_task_is_tried_prepared_and_trained(task):
    """The steps that `headway init` prints, with an engine that needs no vLLM."""
    headway = Headway(task)
    shorter = ("--set", "sft.steps=5")
    for start, command, goes_on in (
        (headway.call, ("try", *SCRIPTED), "headway sft my_task.toml --set"),
        (headway, ("sft",), "headway run my_task.toml --set sft.steps=5"),
        (headway.call, ("try", *SCRIPTED), "headway run my_task.toml --set"),
        (headway, ("run", *SHORT), f"headway rollouts {task}/runs/mine"),
    ):
        name, *settings = command
        result = start(name, "my_task.toml", *settings, *shorter)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"go on with: {goes_on}" in result.stdout
    summary = json.loads((task / "runs" / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", 3)
