"""SIGKILL of publisher and receiver leaves nothing behind, and frees the memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


def shared_megabytes() -> float:
    """Shared memory of the whole node, memfds included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Shmem line")


def test_nothing_remains_after_sigkill_of_publisher_and_receiver() -> None:
    files = set(os.listdir("/dev/shm"))
    publisher, receiver = start(PUBLISHER), start(RECEIVER)
    try:
        manifest = publisher.stdout.readline()
        receiver.stdin.write(manifest)
        receiver.stdin.flush()
        assert float(receiver.stdout.readline()) == MEGABYTES * 2**18
        assert not [name for name in set(os.listdir("/dev/shm")) - files if "headway" in name]
        held = shared_megabytes()
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
    if held - shared_megabytes() < MEGABYTES / 2:
        pytest.fail(f"{held} MiB were shared before the kills, {shared_megabytes()} MiB after")
