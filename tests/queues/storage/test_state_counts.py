"""Counts that are kept: those of the rows, at a cost that does not grow with the run."""

import sqlite3
from contextlib import closing

import pytest

from queues.readers.open_run import open_ledger
from queues.state.groups import Group
from queues.storage.ledger import Ledger, dump_prompt
from queues.storage.ledger_schema import FILE_NAME
from queues.storage.row_checksums import register
from queues.storage.state_counts import count_rows, kept_counts
from tests.queues.conftest import half_a_run, make_prompts

BATCH = 4
WAIT = 10.0


def steps_of_the_last_ack(directory, batches):
    """Instructions of SQLite's machine, after so many batches."""
    prompts = make_prompts(batches * BATCH)
    groups = [
        Group(number=number, group_id=f"g{number:08d}", prompt=prompt)
        for number, prompt in enumerate(prompts, 1)
    ]
    ledger = Ledger(directory, synchronous="normal")
    ledger.begin()
    ledger.issue(groups, [dump_prompt(prompt) for prompt in prompts], "0", last=False)
    steps = 0

    def step():
        nonlocal steps
        steps += 1

    for version in range(batches):
        first = version * BATCH
        ledger.take(version, [group.group_id for group in groups[first : first + BATCH]])
        if version == batches - 1:
            ledger.database.set_progress_handler(step, 1)
        counts = ledger.ack(version, "{}")
    ledger.database.set_progress_handler(None, 0)
    assert counts == ledger.counts()
    assert counts.in_batches == {False: 0, True: batches * BATCH}
    ledger.commit()
    ledger.close()
    return steps


def test_an_acknowledgement_takes_no_longer_however_long_the_run(tmp_path):
    short = steps_of_the_last_ack(tmp_path / "short", batches=5)
    assert short == steps_of_the_last_ack(tmp_path / "long", batches=500)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM groups WHERE number = 6",
        "UPDATE groups SET reason = 'why' WHERE state = 'queued'",
        "UPDATE groups SET state = 'failed', reason = 'why', purpose = 'evaluate' WHERE number = 1",
        "INSERT OR REPLACE INTO groups SELECT * FROM groups",
        "DELETE FROM batch_groups WHERE position = 0",
        "UPDATE batch_groups SET group_id = 'g00000003' WHERE position = 0",
        "UPDATE batches SET acked_at = NULL",
    ],
)
async def test_whatever_changes_rows_changes_the_kept_counts(tmp_path, statement):
    await (await half_a_run(tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        register(database)
        with database:
            database.execute(statement)
        assert kept_counts(database, newest=0) == count_rows(database)


async def test_counts_of_what_was_rolled_back_are_not_kept(tmp_path):
    await (await half_a_run(tmp_path)).close()
    ledger = Ledger(tmp_path, synchronous="normal")
    before = ledger.counts()
    ledger.begin()
    ledger.take(1, ["g00000003"])
    ledger.ack(1, "{}")
    ledger.rollback()
    assert kept_counts(ledger.database, newest=0) == ledger.counts() == before
    ledger.close()


@pytest.mark.parametrize("lost", ["everything", "a count"])
async def test_a_ledger_whose_counts_are_not_those_of_its_rows_is_counted_anew(tmp_path, lost):
    """One that an earlier Headway wrote has none at all."""
    await (await half_a_run(tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        if lost == "a count":
            database.execute("UPDATE kept_states SET value = value + 1")
        else:
            triggers = database.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND name LIKE 'kept%'"
            ).fetchall()
            assert len(triggers) == 5
            for (name,) in triggers:
                database.execute(f"DROP TRIGGER {name}")
            database.execute("DROP INDEX batches_in_training")
            for table in ("kept_states", "kept_members"):
                database.execute(f"DROP TABLE {table}")
    Ledger(tmp_path, synchronous="normal").close()
    with open_ledger(tmp_path) as database:
        assert kept_counts(database, newest=0) == count_rows(database)
        assert count_rows(database).in_batches == {False: 0, True: 2}
