"""A checkpoint waits for the room that it will need before it begins."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from learner import disk_wait
from learner.ranks.rank import Rank as Trained
from learner.ranks.ray_leader import RankZero


class Rank:
    """Writes one file of 3 MB."""

    published_adapter = None
    state_at = Trained.state_at

    def __init__(self, disk: "Disk", checkpoints: Path) -> None:
        weight_sync = SimpleNamespace(wire_dtype="as_trained")
        self.spec = SimpleNamespace(checkpoints=str(checkpoints), weight_sync=weight_sync)
        self.config = SimpleNamespace(ranks=1, zero_stage=0, dtype="float32")
        self.engine = SimpleNamespace(steps_taken=7)
        self.updater = SimpleNamespace(objective=SimpleNamespace(state={}))
        self.disk = disk

    def capture(self) -> None:
        self.disk.asked.append(1)

    def write(self, temporary: str) -> None:
        self.disk.asked.append(0)
        Path(temporary, "weights").write_bytes(bytes(3_000_000))


class Disk:
    """So many bytes free; a million more at each question."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[int] = []

    def has_space(self, folder: Path, size: int = 2**20) -> bool:
        self.asked.append(size)
        self.free += 10**6
        return self.free >= size


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def save(rank: Rank, version: int) -> str:
    lead = RankZero(rank, (), at_once, None, None, None)  # type: ignore[arg-type]

    async def main() -> str:
        settings = {"cursor": None, "totals": {}, "weights_checksum": "5eed"}
        return await (await lead.save(version, **settings))  # type: ignore[arg-type]

    return asyncio.run(main())


def test_a_checkpoint_begins_once_there_is_room_for_one_like_the_last(
    tmp_path, monkeypatch, caplog
):
    disk = Disk(free=0)
    monkeypatch.setattr(disk_wait, "has_space", disk.has_space)
    monkeypatch.setattr(disk_wait, "RETRY_SECONDS", 0.0)
    root = tmp_path / "checkpoints"
    path = save(Rank(disk, root), 5)
    assert path == "checkpoints/v000005"
    assert json.loads((root / "v000005" / "state.json").read_text())["version"] == 5
    assert disk.asked == [1, 2**20, 2**20, 0], "of the first one nothing is known"
    assert caplog.text.count("paused: no space is left on the disk of") == 1
    disk.free, disk.asked = 1_500_000, []
    save(Rank(disk, root), 6)
    assert disk.asked[1] == disk.asked[2] >= 3_000_000
    assert disk.asked[3:] == [0]
    assert sorted(entry.name for entry in root.iterdir()) == ["v000005", "v000006"]


def test_what_a_kill_left_of_a_checkpoint_is_removed_before_room_is_waited_for(
    tmp_path, monkeypatch
):
    leftover = tmp_path / ".v000004.tmp" / "weights"
    leftover.parent.mkdir()
    leftover.write_bytes(bytes(100))
    asked: list[int] = []

    def has_space(folder: Path, size: int) -> bool:
        asked.append(size)
        assert len(asked) < 9, "room is waited for that only the removal makes"
        return not leftover.exists()

    monkeypatch.setattr(disk_wait, "has_space", has_space)
    monkeypatch.setattr(disk_wait, "RETRY_SECONDS", 0.0)
    save(Rank(Disk(free=0), tmp_path), 5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["v000005"]
