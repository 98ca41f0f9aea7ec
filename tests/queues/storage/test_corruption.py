"""Damaged files: a clear error, or a state that the run was in; never a wrong record."""

import asyncio
import random
import shutil
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from queues.errors import JournalError, LedgerError
from queues.readers.accounting import account, read_accounting
from queues.readers.open_run import open_ledger
from queues.storage.journal import LOCATION, Location, read_group
from queues.storage.ledger_schema import FILE_NAME, JOURNAL_NAME
from tests.queues.conftest import answer, frames, make_broker, make_prompts, opened
from tests.red_team.damage import cut, flip

WAL = f"{FILE_NAME}-wal"
BATCHES = 6
OPTIONS: dict[str, Any] = {
    "steps": 100, "segment_bytes": 12_000, "filter_tied": True, "patience_seconds": 0.0
}  # fmt: skip


@dataclass
class Recorded:
    """A run, and everything that it ever was."""

    folder: Path
    payloads: dict[str, bytes] = field(default_factory=dict)
    batches: list[list[bytes]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    """Its accounts after every commit, leases aside: a restart takes them back."""


def settled(accounting):
    return accounting | {"queued": accounting["queued"] + accounting["leased"], "leased": 0}


async def record(folder, *, close, checkpoint_pages=40):
    """Make some batches, filtered groups, an evaluation, and groups in every state.

    Few pages between SQLite's own checkpoints let both files of the ledger hold something.
    """
    run = Recorded(folder)
    broker = make_broker(folder / "live", **OPTIONS)
    commit, ledger = broker.commits.ledger.commit, broker.commits.ledger

    def spied():
        commit()
        run.history.append(settled(account(ledger.counts()).to_dict()))

    ledger.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
    run.history.append(settled((await broker.accounting()).to_dict()))
    broker.commits.ledger.commit = spied
    await broker.evaluate("held-out", make_prompts(2, 90), temperature=0.0, min_version=0)
    for version in range(BATCHES + 1):
        await broker.issue(make_prompts(5, 5 * version), cursor=str(version))
        await broker.serving("a", version)
        leases = await broker.lease("a", 9, 0.0)
        for number, lease in enumerate(leases):
            payload = answer(lease, reward=10.0 * version + number, tied=number == 1)
            if number < 4:
                await broker.put("a", payload)
                run.payloads[lease.group_id] = payload
            elif number == 4:
                await broker.fail("a", lease.group_id, lease.attempt, reason="boom", error="E")
        batch = await broker.take(version, 0.0)
        if batch is None:
            batch = await feed_until(broker, run, version)
        run.batches.append(batch.payloads)
        if version < BATCHES:
            await broker.ack(version, {"loss": 0.5})
            await broker.commit_checkpoint(version + 1, f"checkpoints/v{version + 1:06d}")
    if close:
        await broker.close()
    shutil.copytree(folder / "live", folder / "copy")
    if not close:
        await broker.close()
    run.folder = folder / "copy"
    (run.folder / f"{FILE_NAME}-shm").unlink(missing_ok=True)
    return run


async def feed_until(broker, run, version):
    for _ in range(20):
        for lease in await broker.lease("a", 4, 0.0):
            payload = run.payloads[lease.group_id] = answer(lease)
            await broker.put("a", payload)
        if (batch := await broker.take(version, 0.0)) is not None:
            return batch
        await broker.issue(make_prompts(2, 500 + len(run.history)), cursor="x")
    raise AssertionError(f"no batch {version}")


@pytest.fixture(scope="module", params=[False, True], ids=["killed", "closed"])
def run(request, tmp_path_factory):
    return asyncio.run(record(tmp_path_factory.mktemp("run"), close=request.param))


async def look(folder, run):
    """Read everything back in every way there is, and compare it; the accounts at last."""
    accounting = read_accounting(folder).to_dict()
    assert settled(accounting) in run.history
    with open_ledger(folder) as database:
        rows = database.execute(f"SELECT group_id, {LOCATION} FROM results").fetchall()
    for group_id, *location in rows:
        if location[0] is not None:
            payload = read_group(folder / JOURNAL_NAME, Location(*location))
            assert payload == run.payloads[group_id]
    for path in sorted((folder / JOURNAL_NAME).glob("*.segment")):
        for _, payload in frames(folder / JOURNAL_NAME, int(path.stem)):
            assert payload in run.payloads.values()

    async with opened(make_broker(folder, **OPTIONS)) as broker:
        for version in range((await broker.status()).version):
            batch = await broker.take(version, 0.0)
            assert batch.payloads == run.batches[version]
        assert (await broker.accounting()).to_dict() == settled(accounting)
    return accounting


def damage(folder, seed):
    """Cut one file of a run, or flip some of its bits; return what was done."""
    draw = random.Random(seed)
    journal = sorted((folder / JOURNAL_NAME).glob("*.segment"))
    ledger = [path for name in (FILE_NAME, WAL) if (path := folder / name).exists()]
    path = draw.choice([draw.choice(journal), draw.choice(ledger)])
    content, done = bytearray(path.read_bytes()), "is empty"
    if content:
        done = (cut if draw.random() < 0.3 else flip)(content, draw)
        path.write_bytes(content)
    return f"seed {seed}: {path.name} {done}"


async def test_a_damaged_run_gives_a_clear_error_or_a_state_it_was_in(run, tmp_path):
    outcomes: Counter[str] = Counter()
    for seed in range(120):
        folder = tmp_path / str(seed)
        shutil.copytree(run.folder, folder)
        what = damage(folder, seed)
        try:
            await look(folder, run)
        except (LedgerError, JournalError) as error:
            named = str(folder) in str(error)  # the message says where
            outcomes["unnamed"] += not named
            outcomes[type(error).__name__] += 1
        except BaseException as error:
            error.add_note(what)
            raise
        else:
            outcomes["recovered"] += 1
        shutil.rmtree(folder)
    assert outcomes["unnamed"] == 0
    assert min(outcomes[kind] for kind in ("LedgerError", "JournalError", "recovered")) >= 5


async def test_a_ledger_cut_at_any_byte_is_a_state_that_the_run_was_in(tmp_path):
    """A crash leaves what was written so far of the write-ahead log since its last checkpoint."""
    run = await record(tmp_path, close=False, checkpoint_pages=1000)
    content = (run.folder / WAL).read_bytes()
    frame = 4096 + 24  # page and header
    ends = range(32, len(content), frame)
    seen = []
    for end in [*ends[:: len(ends) // 30], len(content)]:
        folder = shutil.copytree(run.folder, tmp_path / str(end))
        (folder / WAL).write_bytes(content[: end + random.Random(end).randrange(frame)])
        seen.append((await look(folder, run))["trained"])
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 2 * BATCHES)


def test_an_empty_ledger_beside_a_journal_begins_no_new_run(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    (folder / FILE_NAME).write_bytes(b"")
    with pytest.raises(LedgerError, match="empty, but journal/ holds rollouts of a run"):
        make_broker(folder, **OPTIONS)
    with pytest.raises(LedgerError, match="not a ledger"):
        read_accounting(folder)


def test_a_row_that_is_changed_lost_or_doubled_is_seen(run, tmp_path):
    for number, statement in enumerate(
        [
            "UPDATE results SET offset = offset + 1 WHERE group_id = 'g00000003'",
            "DELETE FROM batch_groups WHERE version = 1 AND position = 0",
            "UPDATE checksums SET value = value + 1 WHERE name = 'meta'",
            "DROP TABLE checksums",
        ]
    ):
        folder = shutil.copytree(run.folder, tmp_path / str(number))
        database = sqlite3.connect(folder / FILE_NAME)
        table = statement.split()[2 if "FROM" in statement else 1]
        with database:
            for event in ("insert", "update", "delete"):  # as if no trigger saw it
                if table not in ("checksums", "TABLE"):
                    database.execute(f"DROP TRIGGER {table}_{event}")
            database.execute(statement)
        database.close()
        for read in (read_accounting, partial(make_broker, **OPTIONS)):
            with pytest.raises(LedgerError, match="damaged"):
                read(folder)
