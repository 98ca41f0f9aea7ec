"""The backup of a broker: what was answered is in it, and a run goes on from it elsewhere."""

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queues.errors import LedgerError
from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_batch
from queues.schema import decode
from queues.storage.backup import Change, ChangesConnection, restore
from queues.storage.journal import LOCATION, Location, read_group
from queues.storage.ledger_schema import JOURNAL_NAME
from tests.queues.conftest import answer, make_broker, make_prompts

WAIT = 10.0
ROWS = "SELECT * FROM batches", "SELECT * FROM batch_groups", "SELECT version FROM checkpoints"


def begin(folder: Path, name: str = "run", **options: Any) -> Any:
    """Return a broker whose backup has, unless `backup_seconds` is given, only what is urgent."""
    (folder / "backup").mkdir(exist_ok=True)
    spec = {"backup": folder / "backup", "backup_seconds": 1000.0, "steps": 100} | options
    return make_broker(folder / name, owner=name, session="{}", **spec)


def lose(folder: Path, name: str) -> Path:
    """Make the run anew from the backup, as it is now."""
    (folder / name).mkdir()
    restore(folder / "backup", folder / name)
    return folder / name


async def work(broker: Any, groups: int, engine: str = "a") -> list[str]:
    """Issue prompts and put their results; return the ids of the groups."""
    cursor = int(await broker.cursor() or 0)
    await broker.issue(make_prompts(groups, cursor), cursor=str(cursor + groups))
    await broker.serving(engine, (await broker.status()).version)
    leases = await broker.lease(engine, 2 * groups, 0.0)
    for lease in leases:
        await broker.put(engine, answer(lease))
    return [lease.group_id for lease in leases]


async def train(broker: Any) -> list[str]:
    version = (await broker.status()).version
    batch = await broker.take(version, 0.0)
    if batch is None:
        return []
    await broker.ack(version, {"loss": 0.5})
    return [decode(payload).group_id for payload in batch.payloads]


def test_a_run_whose_disk_is_lost_goes_on_from_its_backup(tmp_path: Path) -> None:
    async def main() -> None:
        broker = begin(tmp_path, max_staleness=2)
        await work(broker, 4)
        trained = await train(broker)
        await broker.commit_checkpoint(1, "checkpoints/v000001")
        trained += await train(broker)
        late = await work(broker, 2)  # after the last take: only within `backup_seconds`
        lost = lose(tmp_path, "elsewhere")
        await broker.close()

        again = begin(tmp_path, "elsewhere", max_staleness=2)
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
        await again.close()

    asyncio.run(main())


def test_results_follow_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        broker = begin(tmp_path, backup_seconds=0.1)
        await work(broker, 2)
        for attempt in range(100):
            with (
                contextlib.suppress(LedgerError),  # what is copied while it is written may be torn
                open_ledger(lose(tmp_path, f"try-{attempt}")) as database,
            ):
                if database.execute("SELECT count(*) FROM results").fetchone()[0] == 2:
                    break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the results do not follow")
        await broker.close()

    asyncio.run(main())


STEPS = st.lists(st.sampled_from(["work", "train", "checkpoint", "fail", "close"]), max_size=12)


@pytest.mark.hypothesis
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, keep=st.sampled_from(["all", "needed"]))
def test_the_backup_is_a_whole_run_with_every_batch_at_every_moment(
    steps: list[str], keep: str
) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.exists() else None) as made:
        asyncio.run(play(Path(made), steps, keep))


async def play(folder: Path, steps: list[str], keep: str) -> None:
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


def test_of_two_brokers_with_one_backup_the_earlier_stops(tmp_path: Path) -> None:
    async def main() -> None:
        cut_off = begin(tmp_path, max_staleness=2)
        await work(cut_off, 4)
        await train(cut_off)
        lose(tmp_path, "elsewhere")
        again = begin(tmp_path, "elsewhere", max_staleness=2)
        with pytest.raises(LedgerError, match="another broker goes on with this run"):
            await train(cut_off)
        await cut_off.close()
        await again.close()
        with pytest.raises(LedgerError, match="is older than its backup"):
            begin(tmp_path)
        await begin(tmp_path, "elsewhere").close()

    asyncio.run(main())


def test_changes_of_a_transaction_that_was_taken_back_are_not_handed_on(tmp_path: Path) -> None:
    database = sqlite3.connect(
        tmp_path / "a.sqlite", isolation_level=None, factory=ChangesConnection
    )
    database.execute("CREATE TABLE numbers (number INTEGER)")
    committed: list[list[Change]] = []
    database.committed = committed.append
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


def test_shared_storage_that_fails_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        broker = begin(tmp_path)
        await work(broker, 2)
        shutil.rmtree(tmp_path / "backup")
        with pytest.raises(LedgerError, match="backup"):
            await train(broker)
        await broker.close()
        missing = tmp_path / "unmounted"
        with pytest.raises(LedgerError, match="cannot be written: FileNotFoundError ENOENT"):
            begin(tmp_path, backup=missing)

    asyncio.run(main())
