"""SIGKILL of publisher and receiver leaves nothing behind, and frees the memory."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

MEGABYTES = 64

PUBLISHER = f"""
import sys, torch
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.shared_memory import SharedMemoryTransport

publisher = StagedPublisher(SharedMemoryTransport(), lambda m: print(m.to_json(), flush=True))
publisher.publish(0, [(f"t{{i}}", torch.ones(2**18)) for i in range({MEGABYTES})])
sys.stdin.read()
"""

RECEIVER = """
import sys
from weight_sync.manifest import Manifest
from weight_sync.receive.staging import stage
from weight_sync.transports.shared_memory import SharedMemoryTransport

staged = stage(Manifest.from_json(sys.stdin.readline()), SharedMemoryTransport())
print(sum(float(tensor.sum()) for _, tensor in staged.tensors()), flush=True)
sys.stdin.read()
"""


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdin.close()
    process.stdout.close()


def open_files(process_id: int | str) -> dict[tuple[int, int], str]:
    """Return the targets of a process's file descriptors by device and inode."""
    files = {}
    with suppress(OSError):  # the process has ended, or belongs to another user
        for link in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(OSError):  # it has just been closed
                about = link.stat()
                files[about.st_dev, about.st_ino] = str(link.readlink())
    return files


def test_nothing_remains_after_sigkill_of_publisher_and_receiver() -> None:
    files = set(os.listdir("/dev/shm"))
    publisher, receiver = start(PUBLISHER), start(RECEIVER)
    try:
        manifest = publisher.stdout.readline()
        receiver.stdin.write(manifest)
        receiver.stdin.flush()
        assert float(receiver.stdout.readline()) == MEGABYTES * 2**18
        assert not [name for name in set(os.listdir("/dev/shm")) - files if "headway" in name]
        weights = [
            file for file, name in open_files(publisher.pid).items() if "memfd:headway" in name
        ]
        assert weights
        kill(publisher)
        late = start(RECEIVER)
        _, _ = late.communicate(manifest, timeout=60)
        assert late.returncode == 1
        kill(receiver)
    finally:
        for process in (publisher, receiver):
            if process.poll() is None:
                kill(process)
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "headway" in name]
    for process_id in os.listdir("/proc"):
        assert not open_files(process_id).keys() & weights, process_id
