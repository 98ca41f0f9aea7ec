"""One Ray cluster for a session of tests, a whole machine for each module, disks that fill up."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def whole_machine() -> Iterator[None]:
    """Gives back the cores and the environment that an engine in this process has taken."""
    cores, environment = os.sched_getaffinity(0), dict(os.environ)
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory, of a size such as "2m"; skips the test where nobody may."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
        if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode:
            pytest.skip("mounting a small disk needs root")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", disk], check=True, timeout=30)
