"""Tables at the end of commands, from hand-made figures."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from deploy.report.tables import describe_failed, show_bias, show_failed
from queues.readers.accounting import FailedPrompt
from queues.readers.selection_bias import Fate, compare
from queues.state.groups import UNREACHABLE

TRAINED = [Fate(name="trained", age=1, seconds=2.0, tokens=10.0, reward=0.5)] * 3


def shown(report):
    written = io.StringIO()
    show_bias(report, Console(file=written, width=120))
    return [" ".join(line.replace("│", " ").split()) for line in written.getvalue().splitlines()]


def test_failed_prompts_are_shown_with_the_lines_that_raised_most_often():
    where = '  File "/home/me/task.py", line 3, in score\n    return marks[completion]'
    errors = [f"raised KeyError('{n}')\n{where}" for n in range(25)] + ["took longer than 30 s"]
    failed = [
        FailedPrompt(f"p/{n}", f"g{n}", "evaluate", 3, "reward", error)
        for n, error in enumerate(errors)
    ]
    written = io.StringIO()
    show_failed(failed, Console(file=written, width=60))
    text = written.getvalue()
    assert "raised KeyError('24')" in text
    assert f"25 of 26 were raised at\n{where}\n" in text
    assert text.count("/home/me/task.py") == 1


@pytest.mark.parametrize("run", [None, Path("runs/mine")])
def test_what_failed_is_named_and_only_training_prompts_are_tried_again(run):
    failed = [
        *(FailedPrompt(f"p/{n}", f"g{n}", "train", 3, "reward", f"raised {n}") for n in range(49)),
        *[FailedPrompt("h/1", "e1", "evaluate", 3, "reward", "raised late" + "!" * 9000)] * 2,
        FailedPrompt("h/2", "e2", "evaluate", 0, UNREACHABLE, "training ended at version 3"),
    ]
    training, *hint, heldout = describe_failed(failed, run).splitlines()
    assert training == (
        "failed for good: 49 training groups, of prompts p/0, p/1, p/2, p/3, p/4 and 44 more; the "
        "last error, of prompt p/48: raised 48"
    )
    again = "to try them again: headway requeue runs/mine, then headway resume runs/mine"
    assert hint == ([again] if run else [])
    assert heldout.startswith("failed for good: 2 held-out groups, of prompts h/1; the last error")
    assert len(heldout) < 2000
    assert describe_failed(failed[-1:], run) == ""


def test_what_was_dropped_is_shown_beside_what_was_trained():
    lines = shown(compare([*TRAINED, Fate(name="dropped", age=2, seconds=10.0)]))
    assert "trained: tokens 3 10 10 10 10" in lines
    assert "dropped: seconds 1 10 10 10 10" in lines
    assert not any(line.startswith("dropped: tokens") for line in lines), "nobody knows them"
    assert lines[-1].startswith("groups meant for training took at least 2.00 times as long")


def test_what_was_masked_is_counted():
    late = Fate(name="late", age=4, seconds=9.0, tokens=60.0, reward=0.0)
    lines = shown(compare([*TRAINED, late], tokens_masked=1234))
    assert "late: age 1 4 4 4 4" in lines
    assert lines[-1] == "1,234 tokens of late groups were masked"


def test_nothing_is_shown_where_everything_was_trained_in_time():
    assert shown(compare(TRAINED)) == []
