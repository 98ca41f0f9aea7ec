"""Who writes on a disk that is full waits, and begins anew."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from learner import full_disk
from learner.full_disk import write_whole

TORCH = RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
SYSTEM = OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """Full from the first failure on, for three questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.slept = 0
        monkeypatch.setattr(full_disk, "has_room", self.has_room)
        monkeypatch.setattr(full_disk, "time", SimpleNamespace(sleep=self.sleep))

    def has_room(self, folder: Path, size: int = full_disk.PROBE_BYTES) -> bool:
        self.asked.append(size)
        return len(self.asked) > 3

    def sleep(self, seconds: float) -> None:
        self.slept += 1


@pytest.mark.parametrize("error", [TORCH, SYSTEM])
def test_a_file_that_is_cut_off_is_removed_and_written_again_once_there_is_as_much_room(
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, file = Disk(monkeypatch), tmp_path / "part.pt"
    (tmp_path / "other").write_text("of another rank")
    there = []

    def write() -> None:
        there.append(file.exists())
        file.write_bytes(bytes(5000))
        if len(there) == 1:
            raise error

    write_whole(file, write)
    assert there == [False, False]
    assert disk.asked[-1] == full_disk.PROBE_BYTES + 5000
    assert disk.slept == disk.asked.count(full_disk.PROBE_BYTES + 5000) - 1 > 0
    assert "paused: no space is left on the disk of" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "part.pt"]


def test_of_a_folder_its_own_files_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("kept")
    attempts = []

    def write() -> None:
        attempts.append(sorted(path.name for path in tmp_path.iterdir()))
        (tmp_path / "config.json").write_text("{}")
        if len(attempts) == 1:
            raise SYSTEM

    write_whole(tmp_path, write)
    assert attempts == [["below"], ["below"]]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_any_other_error_is_raised_at_once(tmp_path: Path) -> None:
    attempts = []

    def write() -> None:
        attempts.append(1)
        raise TORCH

    with pytest.raises(RuntimeError, match="PytorchStreamWriter"):
        write_whole(tmp_path / "part.pt", write)
    assert attempts == [1]
