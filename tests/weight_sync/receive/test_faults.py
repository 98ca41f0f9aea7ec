"""Killed processes: never mixed weights, and a recovery from what is there."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.weight_sync.serving import newest_version
from weight_sync.checksum import checksum
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.filesystem import FilesystemTransport

SERVING = Path(__file__).parents[1] / "serving.py"
RECOVERY_SECONDS = 60.0
"""Far more than a restart needs; most of that is the import of torch."""

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
for version in ({versions}):
    generator = torch.Generator().manual_seed(version)
    tensors = [(name, torch.randn(32, 32, generator=generator)) for name in {names}]
    publisher.publish(version, tensors)
    publisher.flush(600)
"""
NAMES = tuple("abcd")


def make_version(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(32, 32, generator=generator)) for name in NAMES]


def publish(folder: Path, version: int) -> None:
    with StagedPublisher(FilesystemTransport(folder), lambda manifest: None, 4096) as publisher:
        publisher.publish(version, make_version(version))
        publisher.flush(30)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Return a function that starts programs, which end with the test."""
    running: list[subprocess.Popen] = []

    def run(*arguments: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.wait(30)
        process.stdout.close()


def wait_for(condition: Callable[[], object], seconds: float = RECOVERY_SECONDS) -> float:
    """Return the seconds until a condition holds; fail at a deadline."""
    begin, pause = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() - begin < seconds, "it never came true"
        pause.wait(0.01)
    return time.monotonic() - begin


def lines(state: Path) -> list[str]:
    return state.read_text().splitlines() if state.exists() else []


def swapped(version: int) -> list[str]:
    """Return the lines that a whole swap appends to the log of an engine."""
    digest = checksum(make_version(version))
    return ["pause", f"loading {version}", f"loaded {version} {digest}", "resume"]


@pytest.mark.parametrize(("fault", "last"), [("slow-open", "staging"), ("slow-load", "loading 0")])
def test_a_receiver_killed_in_the_middle_is_seeded_with_the_newest_version(
    start, tmp_path, fault: str, last: str
) -> None:
    folder, state, again = tmp_path / "weights", tmp_path / "killed", tmp_path / "again"
    publish(folder, 0)
    victim = start(str(SERVING), str(folder), str(state), fault)
    wait_for(lambda: lines(state)[-1:] == [last])
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    assert not [line for line in lines(state) if line.startswith(("loaded", "resume"))]
    publish(folder, 3)
    start(str(SERVING), str(folder), str(again))
    seconds = wait_for(lambda: lines(again)[-1:] == ["resume"])
    assert lines(again) == swapped(3)
    print(f"recovered in {seconds:.2f} s")


@pytest.mark.parametrize("hang_at", [6, 8])
def test_a_publisher_killed_in_the_middle_leaves_the_version_before(
    start, tmp_path, hang_at: int
) -> None:
    folder, state = tmp_path / "weights", tmp_path / "state"
    code = PUBLISHER.format(hang_at=hang_at, versions="4, 5", names=NAMES)
    publisher = start("-c", code, str(folder))
    assert publisher.stdout.readline() == "in the middle\n"
    publisher.send_signal(signal.SIGKILL)
    publisher.wait(30)
    assert newest_version(folder).version == 4
    start(str(SERVING), str(folder), str(state))
    wait_for(lambda: lines(state)[-1:] == ["resume"])
    begin = time.monotonic()
    publish(folder, 5)
    wait_for(lambda: len(lines(state)) == 8)
    print(f"recovered in {time.monotonic() - begin:.2f} s")
    assert lines(state) == swapped(4) + swapped(5)
    assert [entry.name[:8] for entry in folder.iterdir()] == ["00000005"]
