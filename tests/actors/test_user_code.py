"""Errors of user code: each names the file and the line that raised it."""

import asyncio
import sys
import textwrap
from contextlib import closing

import pytest
from fakes import play

from actors.errors import EnvironmentFailed, RewardFailed, SourceFailed
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import load_rewards
from actors.sources.filters import without_heldout
from actors.sources.load_source import load_source
from headway.errors import InputError
from queues.records import Prompt

TASK = """
    import json

    def score(prompt, completion, answer, metadata):
        return marks(completion)

    def marks(completion):
        return {}[completion]

    class Conversation:
        def reset(self, prompt):
            return json.loads("{")

        def step(self, message):
            return None

    class Problems:
        def __init__(self, options, **_):
            if options:
                raise RuntimeError("no such folder")

        def next(self, count):
            return [1 / 0]

        def cursor(self):
            return "{}"

        def restore(self, cursor):
            pass
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Return the file of a module `own_task`, which fails wherever it is called."""
    file = tmp_path / "own_task.py"
    file.write_text(textwrap.dedent(TASK).lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("own_task", None)


def place(file, line, function):
    return f'\n  File "{file}", line {line}, in {function}\n'


def test_a_reward_that_raises_is_named_with_its_file_and_line(task):
    pool = RewardPool(processes=1)
    rewards = load_rewards(["own_task:score"], pool=pool)
    with closing(pool), pytest.raises(RewardFailed) as caught:
        asyncio.run(rewards.score(Prompt(prompt_id="p/0", text="1+1="), "2"))
    text = str(caught.value)
    assert text.startswith(
        "reward 'own_task:score' of prompt 'p/0' raised KeyError('2')" + place(task, 4, "score")
    )
    assert place(task, 7, "marks") in text
    assert "process_main" not in text


def test_an_environment_that_raises_is_named_with_its_file_and_line(task):
    with pytest.raises(EnvironmentFailed) as caught:
        play(None, environment="own_task:Conversation")
    assert "on prompt 'sums/0/1'" + place(task, 11, "reset") in str(caught.value)
    assert "daemon_thread" not in str(caught.value)


def test_a_source_that_raises_is_named_with_its_file_and_line(task):
    source = load_source("own_task:Problems", options={}, seed=0)
    with pytest.raises(SourceFailed) as caught:
        without_heldout(source, frozenset()).next(1)
    assert "next(1) raised ZeroDivisionError" in str(caught.value)
    assert place(task, 22, "next") in str(caught.value)
    with pytest.raises(InputError) as caught:
        load_source("own_task:Problems", options={"a": 1}, seed=0)
    assert place(task, 19, "__init__") in str(caught.value)


def test_a_module_that_cannot_be_imported_is_named_with_its_file_and_line(task):
    task.write_text("import os\nLIMIT = os.environ['NO_SUCH_VARIABLE']\n")
    with pytest.raises(InputError) as caught:
        load_rewards(["own_task:score"])
    assert "cannot import own_task: KeyError('NO_SUCH_VARIABLE')" in str(caught.value)
    assert place(task, 2, "<module>") in str(caught.value)
    assert "importlib" not in str(caught.value)
