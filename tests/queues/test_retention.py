"""What the journal keeps: everything, or what a rollback could need."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from queues import retention
from queues.accounts import export_parquet, read_accounting, removed_groups
from queues.errors import JournalError
from queues.journal import segments
from queues.retention import removable
from tests.queues.conftest import answer, make_broker, make_prompts

BATCHES = 6
OPTIONS: dict[str, Any] = {"steps": 9, "segment_bytes": 6_000, "max_staleness": 0}


async def train(
    broker: Any, folder: Path, first: int, last: int, *, keep: int, every: int = 1
) -> dict[int, list[bytes]]:
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
def test_every_batch_that_a_rollback_could_train_again_is_there(
    tmp_path: Path, keep_rollouts: str
) -> None:
    async def main() -> dict[int, list[bytes]]:
        broker = make_broker(tmp_path, keep_rollouts=keep_rollouts, **OPTIONS)
        batches = await train(broker, tmp_path, 0, BATCHES, keep=3)
        await broker.close()
        again = make_broker(tmp_path, keep_rollouts=keep_rollouts, **OPTIONS)
        for version in range(BATCHES - 2, BATCHES):  # checkpoints of versions 4, 5 and 6 are there
            assert (await again.take(version, 0.0)).payloads == batches[version]
        await train(again, tmp_path, BATCHES, BATCHES + 1, keep=3)
        await again.close()
        return batches

    batches = asyncio.run(main())
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


def test_without_a_checkpoint_nothing_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        broker = make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)
        await train(broker, tmp_path, 0, 4, keep=1, every=100)
        assert removable(tmp_path) == []
        await broker.commit_checkpoint(3, "checkpoints/of-which-no-folder-is-there")
        assert removable(tmp_path) == []
        await broker.close()

    asyncio.run(main())
    assert removed_groups(tmp_path) == 0


def test_a_segment_stays_for_the_sake_of_one_group_that_is_not_trained(tmp_path: Path) -> None:
    async def main() -> None:
        broker = make_broker(
            tmp_path, keep_rollouts="needed", **(OPTIONS | {"segment_bytes": 10**6})
        )
        await train(broker, tmp_path, 0, 3, keep=1)
        await broker.issue(make_prompts(2, 90), cursor="x")
        await broker.serving("a", 3)
        early, late = await broker.lease("a", 4, 0.0)
        await broker.put("a", answer(early))
        await broker.close()
        again = make_broker(tmp_path, **OPTIONS)  # with a new segment
        await again.serving("a", 3)
        (late,) = await again.lease("a", 4, 0.0)
        await again.put("a", answer(late))
        assert segments(tmp_path / "journal") == [1, 2]
        assert removable(tmp_path) == []
        await again.take(3, 0.0)
        await again.ack(3, {})
        assert removable(tmp_path) == [], "batch 3 could be trained again"
        await train(again, tmp_path, 4, 5, keep=1)
        assert removable(tmp_path)[0] == 1
        await again.close()

    asyncio.run(main())


def test_what_a_crash_kept_from_being_removed_is_removed_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        broker = make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)
        with monkeypatch.context() as patch:
            patch.setattr(retention, "remove_segment", lambda *_: None)
            await train(broker, tmp_path, 0, 3, keep=1)
        before = segments(tmp_path / "journal")
        await train(broker, tmp_path, 3, 4, keep=1)
        assert set(segments(tmp_path / "journal")).isdisjoint(before[:-1])
        await broker.close()

    asyncio.run(main())


def test_a_segment_that_was_lost_is_not_taken_for_one_that_was_removed(tmp_path: Path) -> None:
    async def main() -> None:
        broker = make_broker(tmp_path, keep_rollouts="needed", **OPTIONS)
        await train(broker, tmp_path, 0, 4, keep=2)
        await broker.close()

    asyncio.run(main())
    assert export_parquet(tmp_path, tmp_path / "before.parquet") > 0
    (tmp_path / "journal" / f"{segments(tmp_path / 'journal')[0]:08d}.segment").unlink()
    with pytest.raises(JournalError, match="cannot be read"):
        export_parquet(tmp_path, tmp_path / "after.parquet")
