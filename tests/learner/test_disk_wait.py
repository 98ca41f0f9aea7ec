"""Who writes on a disk that is full waits, and begins anew."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from learner import disk_wait
from learner.disk_wait import make_folder, paused, wait_for_space, write_whole
from learner.engine.checkpoint import prepare

SYSTEM = OSError(errno.ENOSPC, "No space left on device")
SAFETENSORS = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
OTHER = RuntimeError("unexpected pos 800832 vs 800784")


class Disk:
    """Full for the first three questions."""

    def __init__(self, monkeypatch):
        self.asked: list[int] = []
        self.slept = 0
        self.reasons: list[str | None] = []
        monkeypatch.setattr(disk_wait, "has_space", self.has_space)
        monkeypatch.setattr(disk_wait, "time", SimpleNamespace(sleep=self.sleep))

    def has_space(self, folder: Path, size: int = disk_wait.PROBE_BYTES) -> bool:
        self.asked.append(size)
        return len(self.asked) > 3

    def sleep(self, seconds: float):
        self.slept += 1
        self.reasons.append(paused())


@pytest.mark.parametrize("error", [SAFETENSORS, SYSTEM])
def test_a_file_that_is_cut_off_is_removed_and_written_again_once_there_is_as_much_room(
    tmp_path, error, monkeypatch, caplog
):
    disk, file = Disk(monkeypatch), tmp_path / "part.pt"
    (tmp_path / "other").write_text("of another rank")
    there = []

    def write():
        there.append(file.exists())
        file.write_bytes(bytes(5000))
        if len(there) == 1:
            raise error

    write_whole(file, write)
    assert there == [False, False]
    assert disk.asked == [disk_wait.PROBE_BYTES + 5000] * 4
    assert disk.slept == 3
    assert "paused: no space is left on the disk of" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "part.pt"]


def test_of_a_folder_its_own_files_are_written_again(tmp_path, monkeypatch):
    Disk(monkeypatch)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("kept")
    attempts = []

    def write():
        attempts.append(sorted(path.name for path in tmp_path.iterdir()))
        (tmp_path / "config.json").write_text("{}")
        if len(attempts) == 1:
            raise SYSTEM

    write_whole(tmp_path, write)
    assert attempts == [["below"], ["below"]]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_folder_that_cannot_be_made_on_a_full_disk_is_made_once_there_is_room(
    tmp_path, monkeypatch, caplog
):
    disk, mkdir, folder = Disk(monkeypatch), Path.mkdir, tmp_path / "checkpoints" / ".v000001.tmp"

    def make(path: Path, **options: bool):
        if len(disk.asked) < 4:
            raise SYSTEM
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", make)
    assert prepare(folder.parent, 1) == folder
    assert folder.is_dir()
    assert disk.asked == [disk_wait.PROBE_BYTES] * 4
    assert "paused: no space is left on the disk of" in caplog.text
    with pytest.raises(FileExistsError):
        make_folder(folder, exist_ok=False)


def test_any_other_error_is_raised_at_once(tmp_path):
    attempts = []

    def write():
        attempts.append(1)
        raise OTHER

    with pytest.raises(RuntimeError, match="unexpected pos"):
        write_whole(tmp_path / "part.pt", write)
    assert attempts == [1]


def test_whoever_asks_is_told_why_a_process_waits_and_for_how_much_room(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    wait_for_space(tmp_path, 5_000_000)
    assert disk.asked == [5_000_000] * 4
    assert len(disk.reasons) == 2
    for reason in disk.reasons:
        assert f"no space is left on the disk of {tmp_path}" in (reason or "")
        assert "5000000 bytes" in (reason or "")
    assert paused() is None


def test_a_library_that_fills_a_disk_is_known_by_its_error_though_there_is_room_again(
    mount_disk, monkeypatch
):
    """As if another rank had removed its part at once: the disk itself could not tell any more."""
    tensors = {"a": torch.arange(400_000.0), "b": torch.arange(100_000.0)}  # 2 MB
    small_disk = mount_disk("3m")
    ballast, file = small_disk / "ballast", small_disk / "part"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 800_000))
    asked = []

    def write():
        try:
            save_file(tensors, file)
        finally:
            ballast.unlink(missing_ok=True)

    monkeypatch.setattr(disk_wait, "time", SimpleNamespace(sleep=asked.append))
    write_whole(file, write)
    assert file.stat().st_size > 2_000_000
    assert asked == [disk_wait.RETRY_SECONDS]
