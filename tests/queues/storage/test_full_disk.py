"""A disk without room: nothing is answered, nothing is lost, and it goes on when there is room."""

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from headway import full_disk as room
from headway.full_disk import PROBE_BYTES, has_space, is_full
from queues.errors import LedgerError
from queues.readers.accounting import read_accounting
from queues.records import PutStatus
from queues.storage import journal, pause
from queues.storage.ledger import Ledger
from tests.queues.conftest import answer, begin_work, frames, make_broker, opened, until_paused


def fill(file, block, *, leave):
    """Write a file until the disk is full, and free the last `leave` bytes again."""
    with suppress(OSError), file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(block))
    os.truncate(file, max(0, file.stat().st_size - leave))


async def test_a_disk_that_is_really_full_pauses_the_broker_until_there_is_room(
    tmp_path, mount_disk, caplog
):
    disk, paused = mount_disk("3m"), 0
    sizes = {"groups_per_batch": 8, "segment_bytes": 10**5}
    settings = {"synchronous": "full", "probe_seconds": 0.05}
    async with opened(make_broker(disk / "run", **sizes, **settings)) as broker:
        leases = await begin_work(broker, 16, capacity=32)
        accepted: list[bytes] = []
        for number, lease in enumerate(leases[:8]):
            payload = answer(lease, reward=float(number))
            fill(disk / "ballast", 4096 if number % 2 else 65536, leave=4096 * number)
            put = asyncio.create_task(broker.put("a", payload))
            done, _ = await asyncio.wait([put], timeout=0.3)
            if not done:
                paused += 1
                await until_paused(broker, f"no space is left on the disk of {disk / 'run'}")
                assert await broker.heartbeat("a", [(lease.group_id, 1)]) == []
                copy = tmp_path / str(number)  # as if everything were killed now
                shutil.copytree(disk / "run", copy)
                assert read_accounting(copy).ready == len(accepted), "nobody was told of the rest"
                async with opened(make_broker(copy, groups_per_batch=8)) as again:
                    assert (await again.accounting()).balanced
            (disk / "ballast").unlink()
            async with asyncio.timeout(20):
                assert await put is PutStatus.ACCEPTED
            accepted.append(payload)
            await until_paused(broker, "None")
        assert sorted((await broker.take(0, 1.0)).payloads) == sorted(accepted)
        assert (await broker.accounting()).balanced
    assert paused >= 4
    assert "there is space again" in caplog.text


class Full:
    """Runs out of room at the nth point where something is written, once."""

    def __init__(self, at):
        self.at = at
        self.points = 0

    def reached(self):
        self.points += 1
        return self.points == self.at

    def file(self, original):
        full = self

        class File:
            def write(self, content):
                if full.reached():
                    original.write(content[: len(content) // 2])
                    original.flush()
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return original.write(content)

            def __getattr__(self, name):
                return getattr(original, name)

        return File()


def sqlite_full():
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def install(patch, ledger, full):
    """Every point where the broker writes: frames, new segments, syncs, and SQL of any kind."""
    open_file, execute, sync = Path.open, ledger.execute, os.fdatasync

    def opened(self, mode="r", *args, **options):
        if mode != "xb":  # of new segments alone
            return open_file(self, mode, *args, **options)
        if full.reached():
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return full.file(open_file(self, mode))

    def executed(*args, **options):
        if full.reached():
            raise sqlite_full()
        return execute(*args, **options)

    def synced(descriptor):
        if full.reached():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    patch.setattr(Path, "open", opened)
    patch.setattr(ledger, "execute", executed)
    patch.setattr(journal.os, "fdatasync", synced)


async def small_run(folder, full):
    with pytest.MonkeyPatch.context() as patch:
        broker = make_broker(folder, segment_bytes=6_000, probe_seconds=0.001)
        install(patch, broker.commits.ledger, full)
        leases = await begin_work(broker, 4, capacity=8)
        for number, lease in enumerate(leases[:3]):
            await broker.put("a", answer(lease, reward=float(number)))
        batch = await broker.take(0, 10.0)
        await broker.ack(0, {})
        await broker.commit_checkpoint(1, "checkpoints/v000001")
        assert await broker.take(0, 0.0) == batch
    await broker.close()
    return read_accounting(folder).to_dict(), batch.payloads


async def test_wherever_room_runs_out_the_outcome_is_the_same(tmp_path, caplog):
    nowhere = Full(at=0)
    expected = await small_run(tmp_path / "0", nowhere)
    assert nowhere.points > 40
    for at in range(1, nowhere.points + 1):
        caplog.clear()
        assert await small_run(tmp_path / str(at), Full(at)) == expected
        assert caplog.text.count("paused: no space is left") == 1
        written = sum(
            len([*frames(tmp_path / str(at) / "journal", int(path.stem))])
            for path in (tmp_path / str(at) / "journal").glob("*.segment")
        )
        assert written in (3, 4), "a commit that fails after the sync leaves its frame unreferenced"


async def test_a_broker_that_is_closed_while_it_pauses_answers_nobody_and_ends(
    tmp_path, monkeypatch
):
    async with opened(make_broker(tmp_path)) as broker:
        lease, _ = await begin_work(broker, 2, capacity=4)
        monkeypatch.setattr(pause, "has_space", lambda *_: False)
        monkeypatch.setattr(Ledger, "commit", lambda _: (_ for _ in ()).throw(sqlite_full()))
        put = asyncio.create_task(broker.put("a", answer(lease)))
        await until_paused(broker, "no space")
    with pytest.raises(Exception, match=r"nothing more is accepted.*disk is full"):
        await put
    assert read_accounting(tmp_path).ready == 0


async def test_no_lease_expires_while_the_disk_is_full_nor_at_once_afterwards(
    tmp_path, monkeypatch
):
    room = threading.Event()
    commit = Ledger.commit

    def full(self):
        if not room.is_set():
            raise sqlite_full()
        commit(self)

    async with opened(
        make_broker(tmp_path, lease_seconds=1.5, heartbeat_seconds=0.1, probe_seconds=0.01)
    ) as broker:
        lease, other = await begin_work(broker, 2, capacity=4)
        monkeypatch.setattr(pause, "has_space", lambda *_: room.is_set())
        monkeypatch.setattr(Ledger, "commit", full)
        put = asyncio.create_task(broker.put("a", answer(lease)))
        await until_paused(broker, "no space")
        await asyncio.sleep(2.0)  # more than the lease lasts without a heartbeat
        room.set()
        assert await put is PutStatus.ACCEPTED
        assert await broker.put("a", answer(other)) is PutStatus.ACCEPTED
        assert (await broker.status()).given_back == {}


def test_only_errors_of_a_full_disk_are_taken_for_one(tmp_path):
    assert is_full(OSError(errno.ENOSPC, "x"), tmp_path)
    assert is_full(OSError(errno.EDQUOT, "x"), tmp_path)
    assert not is_full(OSError(errno.EIO, "x"), tmp_path)
    assert not is_full(None, tmp_path)
    assert is_full(sqlite_full(), tmp_path)
    io_error = sqlite3.OperationalError("disk I/O error")
    io_error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    assert not is_full(io_error, tmp_path), "this disk has room"
    wrapped = RuntimeError("cannot save")
    wrapped.__cause__ = OSError(errno.ENOSPC, "x")
    assert is_full(wrapped, tmp_path)
    from_elsewhere = RuntimeError("the commit failed: OperationalError('database or disk is full')")
    assert is_full(from_elsewhere, tmp_path)
    assert is_full(Exception("I/O error: No space left on device (os error 28)"), tmp_path)
    assert is_full(Exception("Disk quota exceeded (os error 122)"), tmp_path)
    assert not is_full(Exception("attempt to write a readonly database"), tmp_path)
    assert has_space(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_asking_for_room_takes_little_of_it(tmp_path, monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(room.os, "posix_fallocate", lambda _, start, size: taken.append(size))
    free = shutil.disk_usage(tmp_path).free
    assert has_space(tmp_path, free // 2)
    assert has_space(tmp_path, 4096)
    assert not has_space(tmp_path, 2 * free)
    assert taken == [PROBE_BYTES, 4096], "of a disk that is too small by far, nothing"


def test_a_quota_is_met_although_the_disk_has_room(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(room.os, "posix_fallocate", refuse)
    assert not has_space(tmp_path)


def test_a_ledger_that_finds_no_room_when_it_is_opened_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise sqlite_full()

    monkeypatch.setattr("queues.storage.ledger_schema.create_tables", full)
    with pytest.raises(LedgerError, match="no space is left on the disk of") as raised:
        Ledger(tmp_path, synchronous="full")
    assert "not a ledger" not in str(raised.value)
    assert is_full(raised.value, tmp_path)
