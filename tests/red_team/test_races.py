"""Two commands on one run at once: one wins, the other is refused, and the folder is whole."""

import json
import os
import shutil
from itertools import combinations_with_replacement

import pyarrow.parquet
import pytest

from deploy.storage.run_directory import RunDirectory
from queues.readers.accounting import read_accounting, read_batches
from queues.readers.checkpoints import newest_checkpoint
from tests.red_team.races import COMMANDS, FRESH, STEPS, call, prepare, race, stamp_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RACES = 20
"""Of each pair; in each, one of them is stopped before another file operation."""
FEW = 4
"""The same for pairs with a command that mends."""
READERS = ("report", "export", "inspect")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Provide a folder with an interrupted run, and the operations of each command in it."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    operations = {}
    for name, arguments in COMMANDS.items():
        copied = tmp_path_factory.mktemp(name) / "folder"
        shutil.copytree(folder, copied)
        ended = call(arguments, copied)
        assert ended.code == 0, ended.output
        check(copied, trained=name in ("run", "resume"))
        operations[name] = ended.operations
    return folder, operations


def check(folder, *, trained, name="mine"):
    """Check that everything in the folder is whole, and that there is nothing else."""
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [name, "small-sft"]
    assert [path.name for path in (folder / "runs" / "small-sft").iterdir()] == ["model"]
    assert sorted(path.name for path in folder.iterdir() if path.name != "runs") in (
        [], ["runs-exported"], ["runs.parquet"], ["runs-exported", "runs.parquet"],
    )  # fmt: skip
    stamp_of(folder / "runs" / "small-sft" / "model")
    run = RunDirectory(folder / "runs" / name)
    batches = STEPS if trained else 1
    assert run.lock.rests()
    assert not list(run.path.rglob(".*"))
    assert run.config().name == name
    assert run.rows("sessions.jsonl")[-1]["recipe"]["steps"] == run.config().steps
    accounts = read_accounting(run.path)
    assert accounts.balanced
    assert (accounts.trained, accounts.issued) == (batches, batches)
    assert [row["version"] for row in read_batches(run.path)] == [*range(batches)]
    assert [row["version"] for row in run.rows("metrics.jsonl")] == [*range(batches)]
    version, checkpoint = newest_checkpoint(run.path)
    assert version == batches
    assert [path.name for path in run.checkpoints.iterdir()] == [checkpoint.name]
    assert stamp_of(checkpoint) == f"mine {version}"
    assert json.loads(run.summary_file.read_text())["status"] == (
        "done" if trained else "interrupted"
    )
    assert run.page.read_text().rstrip().endswith("</html>")
    if (folder / "runs-exported").exists():
        assert stamp_of(folder / "runs-exported") in ("mine 1", "mine 2")
    if (folder / "runs.parquet").exists():
        assert pyarrow.parquet.read_table(folder / "runs.parquet").num_rows in (0, 2, 4)


def check_ends(names, ends, stop):
    """Check that one of two commands has won, and that the other was told why it has not."""
    report = "\n".join(f"{name}: {end}" for name, end in zip(names, ends, strict=True))
    report = f"stopped before operation {stop}\n{report}"
    assert 0 in [end.code for end in ends], report
    for name, end in zip(names, ends, strict=True):
        assert "Traceback" not in end.output, report
        assert end.code in ((0, 1, 2) if name in READERS else (0, 2)), report
        assert end.code == 0 or "headway: " in end.output, report
        assert end.code == 0 or not end.began, report  # nobody ends what has begun


def note(pair, ends):
    """Add a line on the races of a pair to the table of outcomes, if one is asked for."""
    if file := os.environ.get("RED_TEAM_TABLE"):
        both = sum(first.code == second.code == 0 for first, second in ends)
        with open(file, "a") as table:
            table.write(f"race       {pair:16} {len(ends)} whole, both won {both}\n")


@pytest.mark.parametrize("names", [*combinations_with_replacement(COMMANDS, 2)], ids="-".join)
def test_of_two_commands_on_one_run_one_wins_and_the_folder_is_whole(prepared, tmp_path, names):
    folder, operations = prepared
    played = []
    races = FEW if {"requeue", "salvage"} & {*names} else RACES
    for number in range(races):
        first, second = names if number % 2 == 0 else names[::-1]
        stop = 1 + number * operations[first] // races
        copied = tmp_path / str(number)
        shutil.copytree(folder, copied)
        ends = race(COMMANDS[first], COMMANDS[second], copied, stop)
        check_ends((first, second), ends, stop)
        won = {name for name, end in zip((first, second), ends, strict=True) if end.code == 0}
        check(copied, trained=bool(won & {"run", "resume"}))
        shutil.rmtree(copied)
        played.append(ends)
    note("-".join(names), played)


def test_of_two_runs_of_a_new_name_one_trains_and_the_other_is_refused(prepared, tmp_path):
    folder, operations = prepared
    for stop in range(1, operations["run"], 1 + operations["run"] // RACES):
        copied = tmp_path / str(stop)
        shutil.copytree(folder / "runs" / "small-sft", copied / "runs" / "small-sft")
        ends = race(FRESH, FRESH, copied, stop)
        check_ends(("run", "run"), ends, stop)
        assert sorted(end.code for end in ends) == [0, 2]
        check(copied, trained=True)
