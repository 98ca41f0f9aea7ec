"""Opening a long ledger costs little for each finished group, and has the time that it takes."""

import sqlite3

import pytest

from queues.broker.recovery import recover
from queues.config import QueuesConfig, RunSpec
from queues.errors import LedgerError
from queues.ray_broker import reading_seconds
from queues.readers import open_run
from queues.readers.accounting import read_accounting
from queues.readers.checkpoints import newest_checkpoint
from queues.readers.open_run import open_ledger
from queues.state.broker_state import BrokerState
from queues.storage.ledger import Ledger
from tests.queues.long_ledger import BATCH, open_broker, write_long_ledger

STEPS = 10
"""Instructions of SQLite between two calls of a progress handler."""


def instructions(folder, groups):
    """Return how many instructions of SQLite the recovery of a finished run takes."""
    write_long_ledger(folder, groups)
    ledger = Ledger(folder, synchronous="normal")
    calls: list[None] = []
    ledger.database.set_progress_handler(lambda: calls.append(None), STEPS)
    spec = RunSpec(groups_per_batch=BATCH, group_size=8, steps=10**6)
    recover(ledger, BrokerState(config=QueuesConfig(), spec=spec))
    ledger.close()
    return len(calls) * STEPS


def test_recovery_reads_finished_groups_only_to_count_them(tmp_path):
    few, many = (instructions(tmp_path / str(count), count) for count in (2_000, 6_000))
    assert (many - few) / 4_000 < 50


def test_a_long_ledger_is_a_run_that_can_go_on(tmp_path):
    write_long_ledger(tmp_path, 1_000)
    open_broker(tmp_path)
    accounts = read_accounting(tmp_path)
    assert (accounts.balanced, accounts.trained, accounts.dropped) == (True, 900, {"filtered": 100})


def test_the_deadline_of_a_broker_grows_with_its_ledger(tmp_path):
    assert reading_seconds(tmp_path) == 0.0
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2 * 10**9)  # has no blocks on disk
    assert reading_seconds(tmp_path) >= 4 * 60


def test_a_process_verifies_a_ledger_once_for_each_content(tmp_path, monkeypatch):
    write_long_ledger(tmp_path, 100)
    verified = []
    check = open_run.check

    def noted(database, path):
        verified.append(path)
        check(database, path)

    monkeypatch.setattr(open_run, "check", noted)
    for _ in range(3):
        read_accounting(tmp_path)
        newest_checkpoint(tmp_path)
    assert len(verified) == 1
    ledger = Ledger(tmp_path, synchronous="normal")
    ledger.begin()
    ledger.remember("key", "value")
    ledger.commit()
    read_accounting(tmp_path)
    ledger.close()
    read_accounting(tmp_path)
    assert len(verified) == 3
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute("DROP TRIGGER groups_update")
    database.execute("UPDATE groups SET attempt = 2 WHERE number = 7")
    database.commit()
    database.close()
    with pytest.raises(LedgerError, match="damaged"), open_ledger(tmp_path):
        pass


def test_sums_do_not_depend_on_the_version_of_python(tmp_path):
    write_long_ledger(tmp_path, 10)
    with open_ledger(tmp_path) as database:
        sums = dict(database.execute("SELECT name, value FROM checksums").fetchall())
    assert (sums["batch_groups"], sums["results"]) == (261724516692867759, 1722672634747898751)
