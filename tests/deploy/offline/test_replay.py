"""Replaying a run: what is planned, what is compared, and whole replays of small runs."""

import sqlite3
from pathlib import Path

import pytest

from deploy.offline.replay import compare, parse_steps, plan_replay
from headway.errors import InputError
from queues.storage.row_checksums import register


def recorded(*checksums):
    return {
        version: {"version": version, "weights_checksum": text, "loss": 0.5, "grad_norm": 1.0}
        for version, text in enumerate(checksums)
    }


@pytest.mark.parametrize(
    ("text", "steps"), [("3:17", (3, 17)), ("40-42", (40, 43)), ("7-7", (7, 8))]
)
def test_steps_end_before_the_second_number_behind_a_colon_and_with_it_behind_a_dash(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["3", "3:3", "5:2", "-1:2", "a:b", "1:2:3", "4-3", "1-2-3", ""])
def test_steps_that_name_no_batch_are_refused_with_an_example(text):
    with pytest.raises(InputError, match=r"write a:b with a below b, as in 10:20, .* or 10-19"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("steps", "start"), [((0, 1), 0), ((1, 2), 0), ((2, 3), 2), ((3, 5), 2), ((4, 5), 4)]
)
def test_a_replay_begins_at_the_nearest_checkpoint_that_is_not_later(steps, start):
    checkpoints = {2: Path("v2"), 4: Path("v4"), 6: Path("v6")}
    plan = plan_replay(steps, recorded(*"abcde"), checkpoints)
    assert (plan.start, plan.first, plan.end) == (start, *steps)
    assert plan.checkpoint == checkpoints.get(start)


def test_batches_that_were_not_trained_are_refused_naming_those_that_were():
    with pytest.raises(InputError, match="batch 2 was not trained; trained are 0 to 1"):
        plan_replay((1, 4), recorded("a", "b"), {})
    with pytest.raises(InputError, match="trained are none"):
        plan_replay((0, 1), {}, {})


def test_the_first_difference_is_said_with_the_figures_that_differ():
    run, again = recorded("a", "b", "c"), recorded("a", "x", "y")
    again[1]["loss"] = 0.25
    pairs = [(run[version], again[version]) for version in run]
    assert compare(pairs[:1]) is None
    assert compare(pairs) == (
        "the weights differ first after batch 1: checksum b recorded and x now, loss 0.5 recorded "
        "and 0.25 now"
    )
    assert str(compare(pairs[2:])).endswith("with the same loss and gradient norm")


def files(folder):
    """Every file of a run with its size and time, without those that SQLite makes for readers."""
    return {
        path.relative_to(folder): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
        and not path.name.endswith("-shm")
        and not (path.name.endswith("-wal") and path.stat().st_size == 0)
    }


def alter(folder, statement):
    """Change the ledger as a broker does, with the checksums of its rows."""
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        register(ledger)
        ledger.execute(statement)
    ledger.close()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_the_weights_of_a_run_are_trained_again_bit_by_bit_and_its_folder_stays(headway, finished):
    before = files(finished.folder)
    again = headway("replay", "small", "--steps", "3:6")
    assert again.returncode == 0, again.stdout + again.stderr
    words = " ".join(again.stdout.split())
    assert "training batches 3 to 5 again from checkpoint 2, first the 1 before them" in words
    assert "the weights after batches 3 to 5 are those of the run" in words
    checksums = [row["weights_checksum"] for row in finished.rows("metrics.jsonl")]
    assert len(set(checksums)) == 6, "every version has other weights"
    assert [again.stdout.count(text) for text in checksums] == [0, 0, 0, 2, 2, 2]
    assert files(finished.folder) == before


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_a_replay_from_the_initial_weights_ends_with_1_at_the_first_difference(headway, copied_run):
    alter(
        copied_run,
        "UPDATE batches SET statistics = json_set(statistics, '$.weights_checksum', 'f00')"
        " WHERE version = 1",
    )
    differs = headway("replay", "copied", "--steps", "0:2")
    assert differs.returncode == 1, differs.stdout + differs.stderr
    words = " ".join(differs.stdout.split())
    assert "again from the initial weights" in words
    assert "the weights differ first after batch 1: checksum f00 recorded and" in words
    assert "with the same loss and gradient norm" in words


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_batches_that_cannot_be_replayed_are_refused(headway, copied_run):
    for segment in (copied_run / "journal").iterdir():
        segment.unlink()
    unreadable = headway.call("replay", "copied", "--steps", "4:6")
    assert unreadable.returncode == 2, unreadable.stdout + unreadable.stderr
    assert "batch 4: its group g0" in unreadable.stderr
    assert "cannot be read any more" in unreadable.stderr
    alter(copied_run, "INSERT INTO meta VALUES ('removed_segment_1', '0')")
    removed = headway.call("replay", "copied", "--steps", "4:6")
    assert removed.returncode == 2, removed.stdout + removed.stderr
    assert 'queues.keep_rollouts = "all" keeps every group' in removed.stderr


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_the_weights_of_a_run_again(headway, stage):
    name = f"two-{stage}"
    headway.finish(
        name, "steps=6", "heldout.every=6", 'actors.reward=["varied:score"]', "actors.cpus=0.0",
        "learner.ranks=2", f"learner.zero_stage={stage}",
    )  # fmt: skip
    again = headway("replay", name, "--steps", "4:6")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the weights after batches 4 to 5 are those of the run" in " ".join(again.stdout.split())
