"""What the journal keeps: everything, or what a rollback could need."""

import asyncio
import threading
from typing import Any

import pytest

from queues.broker import retention
from queues.broker.retention import removable
from queues.errors import JournalError
from queues.readers.accounting import read_accounting
from queues.readers.parquet import export_parquet, removed_groups
from queues.records import PutStatus
from queues.schema import encode
from queues.storage.journal import Journal, segments
from tests.queues.conftest import answer, make_broker, make_group, make_prompts, opened

BATCHES = 6
SECONDS = 30.0
ALL = 10**6
OPTIONS: dict[str, Any] = {"steps": 9, "segment_bytes": 6_000, "max_staleness": 0}


async def train(broker, folder, first, last, *, keep, every=1):
    """Train batches with a checkpoint after each; of their folders `keep` are kept."""
    batches = {}
    for version in range(first, last):
        await broker.issue(make_prompts(2, 2 * version), cursor=str(version))
        await broker.serving("a", version)
        for lease in await broker.lease("a", 4, 0.0):
            await broker.put("a", answer(lease, reward=float(version)))
        batches[version] = (await broker.take(version, 0.0)).payloads
        await broker.ack(version, {})
        if (version + 1) % every:
            continue
        checkpoints = folder / "checkpoints"
        (checkpoints / f"v{version + 1:06d}").mkdir(parents=True)
        for old in sorted(checkpoints.iterdir())[:-keep]:
            old.rmdir()
        await broker.commit_checkpoint(version + 1, f"checkpoints/v{version + 1:06d}")
    return batches


@pytest.mark.parametrize("keep_rollouts", ["all", "needed"])
async def test_every_batch_that_a_rollback_could_train_again_is_there(tmp_path, keep_rollouts):
    async with opened(make_broker(tmp_path, keep_rollouts=keep_rollouts, **OPTIONS)) as broker:
        batches = await train(broker, tmp_path, 0, BATCHES, keep=3)
    async with opened(make_broker(tmp_path, keep_rollouts=keep_rollouts, **OPTIONS)) as again:
        for version in range(BATCHES - 2, BATCHES):  # checkpoints of versions 4, 5 and 6 are there
            assert (await again.take(version, 0.0)).payloads == batches[version]
        await train(again, tmp_path, BATCHES, BATCHES + 1, keep=3)
    there = segments(tmp_path / "journal")
    accounting = read_accounting(tmp_path)
    assert (accounting.trained, accounting.balanced) == (14, True), "the rows of groups stay"
    rows = export_parquet(tmp_path, tmp_path / "rollouts.parquet")
    gone = removed_groups(tmp_path)
    assert rows == 2 * (14 - gone)
    if keep_rollouts == "all":
        assert gone == 0
        assert len(there) >= len(batches)
    else:
        assert gone == 10, "batches 0 … 4: the oldest checkpoint is that of version 5"


async def test_without_a_checkpoint_nothing_is_removed(tmp_path):
    async with opened(make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)) as broker:
        await train(broker, tmp_path, 0, 4, keep=1, every=100)
        assert removable(tmp_path, ALL) == []
        await broker.commit_checkpoint(3, "checkpoints/of-which-no-folder-is-there")
        assert removable(tmp_path, ALL) == []
    assert removed_groups(tmp_path) == 0


async def test_a_segment_stays_for_the_sake_of_one_group_that_is_not_trained(tmp_path):
    async with opened(
        make_broker(tmp_path, keep_rollouts="needed", **(OPTIONS | {"segment_bytes": 10**6}))
    ) as broker:
        await train(broker, tmp_path, 0, 3, keep=1)
        await broker.issue(make_prompts(2, 90), cursor="x")
        await broker.serving("a", 3)
        early, late = await broker.lease("a", 4, 0.0)
        await broker.put("a", answer(early))
    async with opened(make_broker(tmp_path, **OPTIONS)) as again:
        await again.serving("a", 3)
        (late,) = await again.lease("a", 4, 0.0)
        await again.put("a", answer(late))
        assert segments(tmp_path / "journal") == [1, 2]
        assert removable(tmp_path, ALL) == []
        await again.take(3, 0.0)
        await again.ack(3, {})
        assert removable(tmp_path, ALL) == [], "batch 3 could be trained again"
        await train(again, tmp_path, 4, 5, keep=1)
        assert removable(tmp_path, ALL)[0] == 1


async def test_a_result_whose_row_is_still_on_its_way_stays_where_its_segment_looks_finished(
    tmp_path, monkeypatch
):
    """Of two results of one commit the first ends segment 1, and the second begins segment 2."""
    broker = make_broker(
        tmp_path,
        keep_rollouts="needed",
        **(OPTIONS | {"segment_bytes": int(2.5 * len(encode(make_group())))}),
    )
    await train(broker, tmp_path, 0, 1, keep=1)
    assert segments(tmp_path / "journal") == [1]
    await broker.issue(make_prompts(2, 90), cursor="x")
    await broker.serving("a", 1)
    leases = await broker.lease("a", 4, 0.0)
    payloads = [answer(lease) for lease in leases]
    committing, may_commit = threading.Event(), threading.Event()
    commit = broker.commits.ledger.commit

    def slow_commit():
        committing.set()
        assert may_commit.wait(SECONDS)
        commit()

    monkeypatch.setattr(broker.commits.ledger, "commit", slow_commit)
    put = asyncio.create_task(broker.intake.put_many([("a", payload) for payload in payloads]))
    assert await asyncio.to_thread(committing.wait, SECONDS)
    assert segments(tmp_path / "journal") == [1, 2]
    submits = asyncio.Event()  # having decided, or waiting to decide
    submit = broker.commits.submit

    def noted(change):
        submits.set()
        return submit(change)

    monkeypatch.setattr(broker.commits, "submit", noted)
    removal = asyncio.create_task(broker.retention.apply())
    await asyncio.wait_for(submits.wait(), SECONDS)
    may_commit.set()
    assert await put == [PutStatus.ACCEPTED] * 2
    await removal
    await broker.retention.apply()
    batch = await broker.take(1, 0.0)
    assert batch is not None
    assert batch.payloads == payloads
    await broker.close()


async def test_what_a_crash_kept_from_being_removed_is_removed_the_next_time(tmp_path, monkeypatch):
    async with opened(make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)) as broker:
        with monkeypatch.context() as patch:
            patch.setattr(retention, "remove_segment", lambda *_: None)
            await train(broker, tmp_path, 0, 3, keep=1)
        before = segments(tmp_path / "journal")
        await train(broker, tmp_path, 3, 4, keep=1)
        assert set(segments(tmp_path / "journal")).isdisjoint(before[:-1])


async def test_a_segment_that_was_lost_is_not_taken_for_one_that_was_removed(tmp_path):
    async with opened(make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)) as broker:
        await train(broker, tmp_path, 0, 4, keep=2)
    assert export_parquet(tmp_path, tmp_path / "before.parquet") > 0
    (tmp_path / "journal" / f"{segments(tmp_path / 'journal')[0]:08d}.segment").unlink()
    with pytest.raises(JournalError, match="cannot be read"):
        export_parquet(tmp_path, tmp_path / "after.parquet")


async def test_segments_without_any_group_go_once_no_put_that_began_before_them_is_on_its_way(
    tmp_path,
):
    """What a crash between the sync of the journal and the commit of the ledger leaves."""

    def stray():
        journal = Journal(tmp_path / "journal", segment_bytes=1)
        journal.append(b"a frame that no row refers to")
        journal.close()
        return journal.newest

    async with opened(make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)) as broker:
        await train(broker, tmp_path, 0, 2, keep=1)
    left = [stray(), stray()]
    async with opened(make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)) as again:
        with again.retention.put():
            await train(again, tmp_path, 2, 5, keep=1)
            assert segments(tmp_path / "journal")[:2] == [left[1], left[1] + 1]
        await train(again, tmp_path, 5, 6, keep=1)
        assert segments(tmp_path / "journal")[0] > left[1] + 1
