"""Writer, ledger and accounts: grouped commits, a free event loop, books that can be wrong."""

import asyncio
import errno
import os
import shutil
import sqlite3
import tempfile
import threading
from functools import partial

import pytest

from headway.errors import InputError
from queues.errors import AccountingError, LedgerError
from queues.readers.accounting import read_accounting
from queues.readers.checkpoints import newest_checkpoint
from queues.readers.parquet import export_parquet
from queues.records import PutStatus
from queues.state.broker_state import BrokerState
from queues.storage.journal import Journal
from queues.storage.ledger import Ledger
from queues.storage.ledger_schema import FILE_NAME
from queues.storage.row_checksums import register
from tests.queues.conftest import (
    WAIT,
    answer,
    begin_work,
    half_a_run,
    make_broker,
    make_prompts,
    opened,
)


@pytest.mark.parametrize("of_one_message", [False, True])
async def test_puts_that_arrive_together_share_one_commit(tmp_path, monkeypatch, of_one_message):
    events: list[str] = []
    for owner, method in ((Journal, "append"), (Journal, "commit"), (Ledger, "commit")):
        original = getattr(owner, method)

        def spy(self, *args, _original=original, _name=f"{owner.__name__}.{method}"):
            events.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(owner, method, spy)

    settings = {"commit_interval_seconds": 0.0 if of_one_message else 0.1}
    async with opened(make_broker(tmp_path, groups_per_batch=8, **settings)) as broker:
        leases = await begin_work(broker, 16, capacity=32)
        puts = [("a", answer(lease)) for lease in leases]
        events.clear()
        if of_one_message:
            await broker.intake.put_many(puts)
        else:
            await asyncio.gather(*(broker.put(*put) for put in puts))
        made = events[:]
    assert made == ["Journal.append"] * 16 + ["Journal.commit", "Ledger.commit"]


def slow_commits(store, monkeypatch):
    """Let commits wait once the first event is set: they set the second and wait for the third."""
    slow, reached, release = threading.Event(), threading.Event(), threading.Event()
    commit = store.commit

    def blocked(self):
        if slow.is_set():
            reached.set()
            assert release.wait(30)
        commit(self)

    monkeypatch.setattr(store, "commit", blocked)
    return slow, reached, release


async def test_a_slow_disk_holds_up_nobody_who_does_not_wait_for_it(tmp_path, monkeypatch):
    slow, reached, release = slow_commits(Journal, monkeypatch)

    async with opened(make_broker(tmp_path)) as broker:
        lease, other = await begin_work(broker, 2, capacity=4)
        slow.set()
        put = asyncio.create_task(broker.put("a", answer(lease)))
        assert await asyncio.to_thread(reached.wait, 30)
        assert await broker.heartbeat("a", [(other.group_id, 1)]) == []
        assert await broker.lease("a", 2, 0.0) == [], "both are leased"
        await broker.issue(make_prompts(1, 2), cursor="3")
        assert len(await broker.lease("a", 2, WAIT)) == 1, "rows do not wait for payloads"
        assert await broker.take(0, 0.0) is None
        assert not put.done(), "nothing is answered before it is durable"
        release.set()
        assert await put is PutStatus.ACCEPTED


@pytest.mark.parametrize("method", ["issue", "evaluate"])
async def test_a_call_that_is_repeated_is_answered_no_sooner_than_the_first_is_durable(
    tmp_path, monkeypatch, method
):
    slow, reached, release = slow_commits(Ledger, monkeypatch)

    async with opened(make_broker(tmp_path)) as broker:
        calls = {
            "issue": lambda: broker.issue(make_prompts(2), cursor="2", token="t"),
            "evaluate": lambda: broker.evaluate(
                "e", make_prompts(2), temperature=0.0, min_version=0
            ),
        }
        await broker.serving("a", 0)
        slow.set()
        first = asyncio.create_task(calls[method]())
        assert await asyncio.to_thread(reached.wait, 30)
        repeated = asyncio.create_task(calls[method]())
        answered, _ = await asyncio.wait({repeated}, timeout=0.05)
        release.set()
        assert not answered
        await asyncio.gather(first, repeated)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
async def test_after_a_failed_commit_nothing_is_accepted_any_more(tmp_path, monkeypatch, code):
    def broken_disk(*_, **__):
        raise OSError(code, os.strerror(code))

    async with opened(make_broker(tmp_path)) as broker:
        lease, other = await begin_work(broker, 4, capacity=4)
        assert await broker.put("a", answer(lease)) is PutStatus.ACCEPTED
        with monkeypatch.context() as broken:
            broken.setattr(Journal, "commit", broken_disk)
            broken.setattr(tempfile, "TemporaryFile", broken_disk)
            words = f"^{tmp_path}/journal cannot be written: {os.strerror(code)}; the commit failed"
            with pytest.raises(LedgerError, match=words):
                await broker.put("a", answer(other))
        for call in (
            broker.issue(make_prompts(1, 9), cursor="5"),
            broker.take(0, WAIT),
            broker.heartbeat("a", []),
        ):
            with pytest.raises(LedgerError, match="nothing more is accepted"):
                await call
    async with opened(make_broker(tmp_path)) as again:
        accounting = await again.accounting()
        assert (accounting.ready, accounting.queued, accounting.balanced) == (1, 3, True)


async def test_leases_that_cannot_expire_stop_the_broker(tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise AssertionError("a bug")

    async with opened(make_broker(tmp_path, lease_seconds=0.2, heartbeat_seconds=0.05)) as broker:
        lease, _ = await begin_work(broker, 2, capacity=4)
        monkeypatch.setattr(BrokerState, "give_back", broken)
        why = r"leases cannot expire, nothing more is served: AssertionError\('a bug'\)"
        with pytest.raises(LedgerError, match=why):
            await broker.take(0, WAIT)
        for call in (
            broker.put("a", answer(lease)),
            broker.heartbeat("a", []),
            broker.issue(make_prompts(1, 2), cursor="3"),
            broker.prompts_wanted(WAIT),
            broker.lease("a", 4, WAIT),
            broker.accounting(),
        ):
            with pytest.raises(LedgerError, match=why):
                await call
    assert "leases cannot expire any more" in caplog.text
    assert "a bug" in caplog.text
    assert read_accounting(tmp_path).leased == 2


async def test_metadata_that_is_not_json_is_refused_before_anything_is_issued(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        (prompt,) = make_prompts(1)
        prompt.metadata["secret"] = object()
        with pytest.raises(InputError, match="'sums/0/0': metadata is not JSON"):
            await broker.issue([prompt], cursor="1")
        assert (await broker.accounting()).issued == 0


def tamper(directory, statement):
    """As a faulty program of ours would: with checksums that are right."""
    database = sqlite3.connect(directory / FILE_NAME)
    register(database)
    with database:
        database.execute(statement)
    database.close()


async def test_the_accounts_are_read_while_the_broker_writes(tmp_path):
    broker = await half_a_run(tmp_path)
    accounting = await asyncio.to_thread(read_accounting, tmp_path)
    assert accounting.to_dict() == {
        "issued": 6, "queued": 2, "leased": 1, "ready": 1, "taken": 0, "trained": 2,
        "dropped": {}, "failed": {}, "heldout_failed": {}, "trained_twice": 0,
        "duplicates": 0, "balanced": True,
    }  # fmt: skip
    assert accounting == await broker.accounting()
    await broker.close()
    assert read_accounting(tmp_path) == accounting


async def test_the_ledger_is_one_file_once_the_broker_is_closed(tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"

    broker = await half_a_run(run)
    # Somebody looks on, so SQLite itself would leave the last changes in the -wal file.
    onlooker = sqlite3.connect(run / FILE_NAME)
    onlooker.execute("SELECT count(*) FROM groups").fetchall()
    accounting = await broker.accounting()
    await broker.close()
    wal = run / f"{FILE_NAME}-wal"
    assert not wal.exists() or not wal.stat().st_size
    copy.mkdir()
    shutil.copy(run / FILE_NAME, copy)
    onlooker.close()
    assert (accounting.issued, accounting.trained, accounting.leased) == (6, 2, 1)
    assert read_accounting(copy) == accounting


async def test_a_reader_in_the_middle_of_its_reading_does_not_keep_the_broker_from_closing(
    tmp_path, monkeypatch, caplog
):
    impatient = partial(sqlite3.connect, timeout=0.05)

    with monkeypatch.context() as patched:
        patched.setattr("queues.storage.ledger.sqlite3.connect", impatient)
        broker = await half_a_run(tmp_path)
    reader = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM groups").fetchall()
    await broker.issue(make_prompts(1, 6), cursor="7")
    await broker.close()
    reader.close()
    assert "a reader holds the -wal file of ledger.sqlite" in caplog.text
    assert read_accounting(tmp_path).issued == 7


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM groups WHERE state = 'queued' AND number = 6",
        "UPDATE groups SET state = 'ready' WHERE state = 'trained' AND number = 1",
        "UPDATE counters SET value = 7 WHERE name = 'issued'",
    ],
)
async def test_accounts_that_do_not_add_up_say_so(tmp_path, statement):
    await (await half_a_run(tmp_path)).close()
    tamper(tmp_path, statement)
    assert not read_accounting(tmp_path).balanced
    with pytest.raises(AccountingError, match="the groups do not add up"):
        make_broker(tmp_path)


async def test_a_group_in_two_batches_counts_as_trained_twice(tmp_path):
    await (await half_a_run(tmp_path)).close()
    tamper(tmp_path, "INSERT INTO batch_groups VALUES (0, 2, 'g00000001')")
    accounting = read_accounting(tmp_path)
    assert (accounting.trained_twice, accounting.balanced) == (1, False)


async def test_an_acknowledgement_stops_the_run_when_memory_and_ledger_disagree(tmp_path):
    broker = await half_a_run(tmp_path)
    await broker.serving("a", 1)
    (lease,) = await broker.lease("a", 2, WAIT)
    await broker.put("a", answer(lease))
    # A ledger that adds up, but says of a queued group that it is leased.
    tamper(tmp_path, "UPDATE groups SET state = 'leased' WHERE number = 6")
    assert read_accounting(tmp_path).balanced
    assert not (await broker.accounting()).balanced
    straggler = (await broker.status()).waits_for
    await broker.fail("a", *straggler, 1, reason="late", error="late")
    (again, *_) = await broker.lease("a", 2, WAIT)
    await broker.put("a", answer(again))
    assert await broker.take(1, WAIT) is not None
    with pytest.raises(AccountingError, match="after batch 1: the groups do not add up"):
        await broker.ack(1, {})
    await broker.close()


async def test_the_newest_checkpoint_is_the_newest_committed_one_that_is_still_there(tmp_path):
    def folder(version):
        return tmp_path / "checkpoints" / f"v{version:06d}"

    async with opened(make_broker(tmp_path)) as broker:
        assert newest_checkpoint(tmp_path) is None
        for version in (9, 10, 11):
            folder(version).mkdir(parents=True)
        for version in (10, 9):
            await broker.commit_checkpoint(version, str(folder(version)))
        assert newest_checkpoint(tmp_path) == (10, folder(10)), "11 was not committed"
    ledger = (tmp_path / FILE_NAME).read_bytes()
    assert newest_checkpoint(tmp_path) == (10, folder(10))
    folder(10).rmdir()
    assert newest_checkpoint(tmp_path) == (9, folder(9))
    folder(9).rmdir()
    assert newest_checkpoint(tmp_path) is None
    assert (tmp_path / FILE_NAME).read_bytes() == ledger


async def test_a_checkpoint_moves_with_its_run(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"

    async with opened(make_broker(run)) as broker:
        (run / "checkpoints" / "v000003").mkdir(parents=True)
        await broker.commit_checkpoint(3, "checkpoints/v000003")
        assert newest_checkpoint(run) == (3, run / "checkpoints" / "v000003")
    run.rename(moved)
    assert newest_checkpoint(moved) == (3, moved / "checkpoints" / "v000003")


def test_what_is_not_a_run_is_refused_by_name(tmp_path):
    export = partial(export_parquet, file=tmp_path / "x")
    for read in (read_accounting, newest_checkpoint, export):
        with pytest.raises(InputError, match=r"no ledger\.sqlite here"):
            read(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match="not a ledger"):
        read_accounting(tmp_path)
    with pytest.raises(LedgerError, match="not a ledger"):
        make_broker(tmp_path)


async def test_a_ledger_of_another_version_is_refused(tmp_path):
    await make_broker(tmp_path).close()
    tamper(tmp_path, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    for read in (read_accounting, make_broker):
        with pytest.raises(LedgerError, match="schema version 99, this Headway reads 7"):
            read(tmp_path)


async def test_an_export_never_takes_the_place_of_a_file_nor_leaves_half_of_one(tmp_path):
    await make_broker(tmp_path).close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(InputError, match="exists; name a file that does not"):
        export_parquet(tmp_path, tmp_path / FILE_NAME)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    with pytest.raises(InputError, match="cannot be written"):
        export_parquet(tmp_path, tmp_path / "missing" / "file.parquet")
    assert not [*tmp_path.rglob("*.partial")]
