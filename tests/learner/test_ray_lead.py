"""A checkpoint that finds no room waits for it and begins anew."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner import ray_lead
from learner.ray_lead import Lead


class Rank:
    """Writes one file; the first `fails` times it is cut off as torch is by a full disk."""

    def __init__(self, disk: "Disk", fails: int) -> None:
        self.config = SimpleNamespace(ranks=1, zero_stage=0, dtype="float32")
        self.engine = SimpleNamespace(steps_taken=7)
        self.updater = SimpleNamespace(objective=SimpleNamespace(state={}))
        self.disk, self.fails, self.folders = disk, fails, []

    def write(self, temporary: str) -> None:
        self.folders.append(sorted(path.name for path in Path(temporary).iterdir()))
        Path(temporary, "weights").write_bytes(bytes(3_000_000))
        if self.fails:
            self.fails -= 1
            self.disk.free = 0
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")


class Disk:
    """So many bytes free; a million more at each question."""

    free = 10**9

    def __init__(self) -> None:
        self.asked: list[int] = []

    def has_room(self, folder: Path, size: int = 2**20) -> bool:
        self.asked.append(size)
        self.free += 10**6
        return self.free >= size


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def make_lead(root: Path, rank: Rank, followers: tuple[Any, ...] = ()) -> Lead:
    return Lead(rank, followers, at_once, None, checkpoints=root)  # type: ignore[arg-type]


def test_a_checkpoint_cut_off_by_a_full_disk_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    monkeypatch.setattr(ray_lead, "has_room", disk.has_room)
    monkeypatch.setattr(ray_lead, "RETRY_SECONDS", 0.0)
    rank = Rank(disk, fails=2)
    root = tmp_path / "checkpoints"
    path = asyncio.run(make_lead(root, rank).save(5, cursor=None, totals={}))
    assert path == "checkpoints/v000005"
    assert json.loads((root / "v000005" / "state.json").read_text())["version"] == 5
    assert sorted(entry.name for entry in root.iterdir()) == ["v000005"]
    assert rank.folders == [[], [], []], "what was cut off is gone before the next attempt"
    after_failure = disk.asked[disk.asked.index(3_000_000) :]
    assert after_failure[:2] == [3_000_000, 3_000_000], "it waits for what the first attempt took"
    assert caplog.text.count("paused: no space is left on the disk of") == 2
    asyncio.run(make_lead(root, rank).save(6, cursor=None, totals={}))
    assert disk.asked[-1] >= 3_000_000, "the next one waits for the size of the last"


def test_an_error_that_is_not_of_a_full_disk_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(Disk(), fails=1)
    with pytest.raises(RuntimeError, match="PytorchStreamWriter"):
        asyncio.run(make_lead(tmp_path / "checkpoints", rank).save(5, cursor=None, totals={}))
    assert len(rank.folders) == 1
