"""The backup of a broker: what was answered is in it, and a run goes on from it elsewhere."""

import asyncio
import contextlib
import errno
import itertools
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queues.errors import LedgerError
from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_batch
from queues.schema import decode
from queues.storage import backup, pause
from queues.storage.backup import Change, ChangesConnection, restore
from queues.storage.journal import LOCATION, Location, read_group, segments
from queues.storage.ledger_schema import JOURNAL_NAME
from tests.queues.conftest import (
    begin_work,
    make_broker,
    make_prompts,
    opened,
    put_all,
    unfinished,
    until_paused,
)

WAIT = 10.0
ROWS = "SELECT * FROM batches", "SELECT * FROM batch_groups", "SELECT version FROM checkpoints"


def begin(folder, name="run", **options):
    """Return a broker whose backup has, unless `backup_seconds` is given, only what is urgent."""
    (folder / "backup").mkdir(exist_ok=True)
    spec = {"backup": folder / "backup", "backup_seconds": 1000.0, "steps": 100} | options
    return make_broker(folder / name, owner=name, session="{}", **spec)


def lose(folder, name):
    """Make the run anew from a copy of the backup, as it is now."""
    copy = Path(shutil.copytree(folder / "backup", folder / f"backup-{name}"))
    (folder / name).mkdir()
    restore(copy, folder / name)
    shutil.rmtree(copy)
    return folder / name


def take_over(folder, name):
    """Make the run anew from the backup, which is then that of the new folder."""
    (folder / name).mkdir()
    restore(folder / "backup", folder / name)
    return folder / name


async def work(broker, groups, engine="a"):
    """Issue prompts and put their results; return the ids of the groups."""
    cursor = int(await broker.cursor() or 0)
    await broker.issue(make_prompts(groups, cursor), cursor=str(cursor + groups))
    await broker.serving(engine, (await broker.status()).version)
    leases = await broker.lease(engine, 2 * groups, 0.0)
    await put_all(broker, leases, engine)
    return [lease.group_id for lease in leases]


async def train(broker):
    version = (await broker.status()).version
    batch = await broker.take(version, 0.0)
    if batch is None:
        return []
    await broker.ack(version, {"loss": 0.5})
    return [decode(payload).group_id for payload in batch.payloads]


async def test_a_run_whose_disk_is_lost_goes_on_from_its_backup(tmp_path):
    async with opened(begin(tmp_path, max_staleness=2)) as broker:
        await work(broker, 4)
        trained = await train(broker)
        await broker.commit_checkpoint(1, "checkpoints/v000001")
        trained += await train(broker)
        late = await work(broker, 2)  # after the last take: only within `backup_seconds`
        lost = take_over(tmp_path, "elsewhere")

    async with opened(begin(tmp_path, "elsewhere", max_staleness=2)) as again:
        status = await again.status()
        assert (status.version, status.accepted) == (2, 4)
        for version in (0, 1):  # to be trained again from the checkpoint, as they were
            groups = [decode(x).group_id for x in read_batch(lost, version)]
            assert groups == trained[2 * version : 2 * version + 2]
        redone = await work(again, 2)
        assert len(redone) == len(late) == 2
        trained += await train(again)
        assert len(set(trained)) == len(trained) == 6
        accounts = await again.accounting()
        assert (accounts.trained, accounts.trained_twice, accounts.balanced) == (6, 0, True)


async def test_what_was_saved_and_noted_of_a_group_is_in_the_backup(tmp_path):
    async with opened(begin(tmp_path)) as broker:
        (lease,) = await begin_work(broker, 1, capacity=2)
        await broker.save("a", unfinished(lease, 0))
        await broker.note("a", lease.group_id, 1, 1, "turn/0", b"said", 0)
    take_over(tmp_path, "elsewhere")
    async with opened(begin(tmp_path, "elsewhere")) as again:
        await again.serving("b", 0)
        (carries,) = await again.lease("b", 2, WAIT)
        assert (carries.saved, carries.notes) == (unfinished(lease, 0), {(1, "turn/0"): b"said"})


async def test_a_broker_that_is_overtaken_while_it_begins_leaves_the_backup_alone(
    tmp_path, monkeypatch
):
    async with opened(begin(tmp_path)) as broker:
        await work(broker, 2)
        trained = await train(broker)

    def overtaken(folder):
        monkeypatch.undo()
        take_over(tmp_path, "elsewhere")
        return segments(folder)

    monkeypatch.setattr(backup, "segments", overtaken)
    with pytest.raises(LedgerError, match="went on elsewhere"):
        begin(tmp_path)
    async with opened(begin(tmp_path, "elsewhere")):
        assert [decode(x).group_id for x in read_batch(tmp_path / "elsewhere", 0)] == trained


async def test_a_ledger_that_changes_while_it_is_copied_is_copied_again(tmp_path, monkeypatch):
    async with opened(begin(tmp_path)) as broker:
        await work(broker, 2)
        original, copied = shutil.copyfile, list[Path]()

        def copyfile(source, target, **options):
            original(source, target, **options)
            if not copied:
                with Path(source).open("ab") as file:  # as a broker that still writes
                    file.write(bytes(4096))
            copied.append(target)

        monkeypatch.setattr(backup.shutil, "copyfile", copyfile)
        run = take_over(tmp_path, "elsewhere")
        [ledger] = (tmp_path / "backup").glob("ledger-*.sqlite")
        assert (run / "ledger.sqlite").read_bytes() == ledger.read_bytes()
        monkeypatch.undo()


async def test_results_follow_in_time(tmp_path):
    async with opened(begin(tmp_path, backup_seconds=0.1)) as broker:
        await work(broker, 2)
        until = time.monotonic() + 1.0  # ten times as long, for a machine with other work
        for attempt in itertools.count():
            with (
                contextlib.suppress(LedgerError),  # what is copied while it is written may be torn
                open_ledger(lose(tmp_path, f"try-{attempt}")) as database,
            ):
                if database.execute("SELECT count(*) FROM results").fetchone()[0] == 2:
                    break
            assert time.monotonic() < until, "the results do not follow"
            await asyncio.sleep(0.02)


STEPS = st.lists(st.sampled_from(["work", "train", "checkpoint", "fail", "close"]), max_size=12)


@pytest.mark.hypothesis
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, keep=st.sampled_from(["all", "needed"]))
def test_the_backup_is_a_whole_run_with_every_batch_at_every_moment(steps, keep):
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.exists() else None) as made:
        asyncio.run(play(Path(made), steps, keep))


async def play(folder, steps, keep):
    options = {"max_staleness": 2, "keep_rollouts": keep, "segment_bytes": 2000}
    broker = begin(folder, **options)
    for number, step in enumerate(steps):
        if step == "work":
            await work(broker, 2)
        elif step == "train":
            await train(broker)
        elif step == "checkpoint":
            version = (await broker.status()).version
            (folder / f"run/checkpoints/v{version}").mkdir(parents=True, exist_ok=True)
            await broker.commit_checkpoint(version, f"checkpoints/v{version}")
        elif step == "fail":
            await broker.issue(make_prompts(1, 900 + number), cursor=await broker.cursor() or "0")
            for lease in await broker.lease("a", 2, 0.0):
                await broker.fail("a", lease.group_id, lease.attempt, reason="r", error="E")
        else:
            await broker.close()
            broker = begin(folder, **options)
        copy = lose(folder, f"copy-{number}")
        with (
            open_ledger(folder / "run", verify=False) as ledger,
            open_ledger(copy, verify=True) as copied,
        ):
            for query in ROWS:
                assert [*map(tuple, copied.execute(query))] == [*map(tuple, ledger.execute(query))]
            here, there = (
                {tuple(row) for row in database.execute("SELECT group_id, attempt FROM results")}
                for database in (ledger, copied)
            )
            assert there <= here
            assert step != "close" or there == here
            for row in copied.execute(f"SELECT {LOCATION} FROM results"):
                if (folder / f"run/{JOURNAL_NAME}/{row[0]:08d}.segment").exists():
                    read_group(copy / JOURNAL_NAME, Location(*row))
        shutil.rmtree(copy)
    await broker.close()


async def test_of_two_brokers_with_one_backup_the_earlier_stops(tmp_path):
    async with opened(begin(tmp_path, max_staleness=2)) as cut_off:
        await work(cut_off, 4)
        await train(cut_off)
        take_over(tmp_path, "elsewhere")
        with pytest.raises(LedgerError, match="another broker goes on with this run"):
            await train(cut_off)  # before there is another
    with pytest.raises(LedgerError, match="is older than its backup"):
        begin(tmp_path)
    async with opened(begin(tmp_path, "elsewhere", max_staleness=2)) as again:
        assert len(await train(again)) == 2
    with pytest.raises(LedgerError, match="is older than its backup"):
        begin(tmp_path)
    await begin(tmp_path, "elsewhere").close()


def test_changes_of_a_transaction_that_was_taken_back_are_not_handed_on(tmp_path):
    database = sqlite3.connect(
        tmp_path / "a.sqlite", isolation_level=None, factory=ChangesConnection
    )
    database.execute("CREATE TABLE numbers (number INTEGER)")
    committed: list[list[Change]] = []
    database.committed = lambda changes, urgent: committed.append(changes)
    for number, ends in enumerate(["ROLLBACK", None, "COMMIT", "COMMIT"]):
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO numbers VALUES (?)", [(number,)])
        assert database.execute("SELECT count(*) FROM numbers").fetchone() is not None
        if ends is None:
            database.rollback()  # as SQLite itself does after some errors
        else:
            database.execute(ends)
    assert [change for [change] in committed] == [
        ("INSERT INTO numbers VALUES (?)", [(number,)]) for number in (2, 3)
    ]
    database.close()


async def test_shared_storage_that_fails_is_named(tmp_path):
    async with opened(begin(tmp_path)) as broker:
        await work(broker, 2)
        shutil.rmtree(tmp_path / "backup")
        with pytest.raises(LedgerError, match=r"the backup in .*/backup cannot be read: .*No such"):
            await train(broker)
    missing = tmp_path / "unmounted"
    with pytest.raises(LedgerError, match="cannot be written: FileNotFoundError ENOENT"):
        begin(tmp_path, backup=missing)


async def test_segments_that_the_broker_before_appended_later_are_not_taken_for_new_ones(tmp_path):
    async with opened(begin(tmp_path, max_staleness=2)) as cut_off:
        await work(cut_off, 4)
        await train(cut_off)
        lost = take_over(tmp_path, "elsewhere")
    newest = max((lost / JOURNAL_NAME).iterdir())
    journal = tmp_path / "backup" / JOURNAL_NAME
    (journal / f"{int(newest.stem) + 1:08d}.segment").write_bytes(b"late" * 100)
    with (journal / newest.name).open("ab") as file:
        file.write(b"late")
    async with opened(begin(tmp_path, "elsewhere", max_staleness=2)) as again:
        assert await work(again, 4)
        await train(again)
    for copy in journal.iterdir():
        assert copy.read_bytes() == (lost / JOURNAL_NAME / copy.name).read_bytes()


async def test_a_segment_that_is_removed_while_the_journal_is_copied_ends_nothing(
    tmp_path, monkeypatch
):
    async with opened(begin(tmp_path, max_staleness=2, segment_bytes=100)) as broker:
        monkeypatch.setattr(backup, "segments", lambda folder: [0, *segments(folder)])
        await work(broker, 4)
        assert len(await train(broker)) == 2


async def test_a_backup_is_restored_whose_last_change_was_half_written(tmp_path):
    async with opened(begin(tmp_path, max_staleness=2)) as broker:
        await work(broker, 2)
        await train(broker)
    [ledger] = (tmp_path / "backup").glob("ledger-*.sqlite")
    program = (
        "import os, sqlite3, sys; copy = sqlite3.connect(sys.argv[1], isolation_level=None);"
        " copy.executescript('PRAGMA synchronous = OFF; PRAGMA cache_size = 1; BEGIN;"
        " CREATE TABLE other (x); INSERT INTO other VALUES (zeroblob(4000000))');"
        " os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, ledger]).returncode == 9
    assert ledger.with_name(f"{ledger.name}-journal").stat().st_size > 0
    with open_ledger(take_over(tmp_path, "elsewhere"), verify=True) as database:
        assert database.execute("SELECT count(*) FROM batches").fetchone()[0] == 1


async def test_a_broker_that_is_killed_goes_on_from_its_folder_and_its_backup(tmp_path):
    program = (
        "import asyncio, os, sys; from pathlib import Path;"
        " from tests.queues.storage.test_backup import begin, train, work\n"
        "async def main():\n"
        "    broker = begin(Path(sys.argv[1]), max_staleness=2)\n"
        "    await work(broker, 4); await train(broker); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path])
    assert killed.returncode == -9

    lose(tmp_path, "copy")
    for name in ("run", "elsewhere"):
        if name == "elsewhere":
            take_over(tmp_path, name)
        async with opened(begin(tmp_path, name, max_staleness=2)) as broker:
            assert (await broker.status()).version == 1
            accounts = await broker.accounting()
            assert (accounts.trained, accounts.trained_twice, accounts.balanced) == (2, 0, True)


def stall(monkeypatch, work):
    """Have `work` done before whatever is made durable in the backup."""
    original = backup.sync_path

    def sync(path):
        work()
        original(path)

    monkeypatch.setattr(backup, "sync_path", sync)


@pytest.mark.parametrize("is_full", [True, False])
async def test_storage_that_is_full_or_does_not_answer_is_waited_for(
    tmp_path, monkeypatch, is_full
):
    async with opened(begin(tmp_path, max_staleness=2, probe_seconds=0.01)) as broker:
        await work(broker, 4)
        freed, waiting = threading.Event(), threading.Event()

        def write():
            waiting.set()
            if is_full and not freed.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            assert freed.wait(WAIT)

        stall(monkeypatch, write)
        monkeypatch.setattr(pause, "has_space", lambda *_: freed.is_set())
        training = asyncio.create_task(train(broker))
        reason = "no space is left on the disk of .*backup" if is_full else "backup does not answer"
        await until_paused(broker, reason)
        assert waiting.is_set()
        assert not training.done()
        freed.set()
        async with asyncio.timeout(WAIT):
            assert len(await training) == 2
        await until_paused(broker, "None")
    with open_ledger(lose(tmp_path, "copy")) as database:
        assert database.execute("SELECT acked_at FROM batches").fetchone()[0] is not None


async def test_full_storage_does_not_keep_a_broker_from_closing(tmp_path, monkeypatch):
    def write():
        raise OSError(errno.ENOSPC, "No space left on device")

    broker = begin(tmp_path, max_staleness=2)
    await work(broker, 4)
    stall(monkeypatch, write)
    monkeypatch.setattr(pause, "has_space", lambda *_: False)
    training = asyncio.create_task(train(broker))
    await until_paused(broker, "no space is left")
    async with asyncio.timeout(WAIT):
        await broker.close()
        with pytest.raises(LedgerError, match="cannot be written: OSError ENOSPC"):
            await training
