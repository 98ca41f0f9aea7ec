"""Killed processes: never mixed weights, a recovery from what is there, and no memory left."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.waiting import until
from tests.weight_sync.checksum import checksum
from tests.weight_sync.conftest import Sender
from tests.weight_sync.serving import newest_version
from weight_sync.transports.filesystem import FilesystemTransport

ROOT = Path(__file__).parents[3]
SERVING = ("-m", "tests.weight_sync.serving")
PUBLISHER = """
import sys, time, torch
from pathlib import Path
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.filesystem import FilesystemTransport

class Slow(FilesystemTransport):
    written = 0
    def write(self, version, nbytes, pieces):
        self.written += 1
        if self.written == {hang_at}:
            print("in the middle", flush=True)
            time.sleep(600)
        return super().write(version, nbytes, pieces)

publisher = StagedPublisher(Slow(Path(sys.argv[1])), lambda manifest: None, 4096)
for version in (4, 5):
    publisher.publish(version, [(name, torch.full((32, 32), version / 7)) for name in "abcd"])
    publisher.flush(600)
"""


def make_version(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((32, 32), version / 7)) for name in "abcd"]


def publish(folder: Path, version: int) -> None:
    with Sender(FilesystemTransport(folder), 4096) as sender:
        sender.send(version, dict(make_version(version)))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Return a function that starts programs, which end with the test."""
    running: list[subprocess.Popen] = []

    def run(*arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        kill(process)
        process.stdin.close()
        process.stdout.close()


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(30)


def lines(state: Path) -> list[str]:
    return state.read_text().splitlines() if state.exists() else []


def swapped(version: int) -> list[str]:
    """Return the lines that a whole swap appends to the log of an engine."""
    digest = checksum(make_version(version))
    return ["pause", f"loading {version}", f"loaded {version} {digest}", "resume"]


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        pytest.param("slow-open", "staging", marks=pytest.mark.slow),
        ("slow-load", "loading 0"),
    ],
)
def test_a_receiver_killed_in_the_middle_is_seeded_with_the_newest_version(
    start, tmp_path, fault: str, last: str
) -> None:
    folder, state, again = tmp_path / "weights", tmp_path / "killed", tmp_path / "again"
    publish(folder, 0)
    victim = start(*SERVING, str(folder), str(state), fault)
    until(lambda: lines(state)[-1:] == [last])
    kill(victim)
    assert not [line for line in lines(state) if line.startswith(("loaded", "resume"))]
    publish(folder, 3)
    start(*SERVING, str(folder), str(again))
    until(lambda: lines(again)[-1:] == ["resume"])
    assert lines(again) == swapped(3)


@pytest.mark.parametrize("hang_at", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_a_publisher_killed_in_the_middle_leaves_the_version_before(
    start, tmp_path, hang_at: int
) -> None:
    folder, state = tmp_path / "weights", tmp_path / "state"
    publisher = start("-c", PUBLISHER.format(hang_at=hang_at), str(folder))
    assert publisher.stdout.readline() == "in the middle\n"
    kill(publisher)
    assert newest_version(folder).version == 4
    start(*SERVING, str(folder), str(state))
    until(lambda: lines(state)[-1:] == ["resume"])
    publish(folder, 5)
    until(lambda: len(lines(state)) == 8)
    assert lines(state) == swapped(4) + swapped(5)
    assert [entry.name[:8] for entry in folder.iterdir()] == ["00000005"]


MEGABYTES = 64
SHARES = f"""
import sys, torch
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.shared_memory import SharedMemoryTransport

publisher = StagedPublisher(SharedMemoryTransport(), lambda m: print(m.to_json(), flush=True))
publisher.publish(0, [(f"t{{i}}", torch.ones(2**18)) for i in range({MEGABYTES})])
sys.stdin.read()
"""
STAGES = """
import sys
from weight_sync.manifest import Manifest
from weight_sync.receive.staging import stage
from weight_sync.transports.shared_memory import SharedMemoryTransport

staged = stage(Manifest.from_json(sys.stdin.readline()), SharedMemoryTransport())
print(sum(float(tensor.sum()) for _, tensor in staged.tensors()), flush=True)
sys.stdin.read()
"""


def held_files(process_id: int | str) -> dict[tuple[int, int], str]:
    """Return the targets of a process's file descriptors by device and inode."""
    files = {}
    with suppress(OSError):  # the process has ended, or belongs to another user
        for link in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(OSError):  # it has just been closed
                about = link.stat()
                files[about.st_dev, about.st_ino] = str(link.readlink())
    return files


def test_shared_memory_is_freed_with_the_last_process_that_holds_it(start) -> None:
    publisher, receiver = start("-c", SHARES), start("-c", STAGES)
    manifest = publisher.stdout.readline()
    receiver.stdin.write(manifest)
    receiver.stdin.flush()
    assert float(receiver.stdout.readline()) == MEGABYTES * 2**18
    held = held_files(publisher.pid).items()
    weights = [file for file, name in held if "memfd:headway" in name]
    assert weights
    kill(publisher)
    late = start("-c", STAGES)
    late.stdin.write(manifest)
    late.stdin.flush()
    assert late.wait(60) == 1
    kill(receiver)
    for process_id in os.listdir("/proc"):
        assert not held_files(process_id).keys() & weights, process_id
