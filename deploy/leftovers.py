"""Ends Ray's workers on this machine, with the shared memory that they would leave behind.

Ray kills them without a word, and so does whoever runs out of time; named shared memory, such as
vLLM's message queues, would then stay until the machine restarts.
"""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own helpers, without which it believes the whole node dead."""

_MAPPED = re.compile(rf"(\d+) +{SHARED_MEMORY}/", re.MULTILINE)
"""A line of /proc/<pid>/maps: the inode, and where the file was when it was opened."""

END_SECONDS = 2.0
"""How long killed processes may take to be gone."""


@contextmanager
def ending_workers() -> Iterator[None]:
    """Halts every Ray worker below this process and all that each started; kills them afterwards.

    Ray is to be shut down in the block: workers that die before it does are mourned on the screen.
    """
    halted: set[psutil.Process] = set()
    left: list[Path] = []
    try:
        while new := _family() - halted:  # who was started before its parent was halted
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            halted |= new
        left = mapped_files(process.pid for process in halted)
        yield
    finally:
        for process in halted:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _await_end(halted)
        for path in left:
            path.unlink(missing_ok=True)


def _await_end(killed: Iterable[psutil.Process]) -> None:
    """Returns when the processes are gone or wait to be reaped, at most `END_SECONDS` later."""
    deadline = time.monotonic() + END_SECONDS
    while any(_lives(process) for process in killed) and time.monotonic() < deadline:
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def mapped_files(pids: Iterable[int]) -> list[Path]:
    """Files in /dev/shm that processes have mapped, under whatever name, younger than this one."""
    inodes: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    began, found = psutil.Process().create_time(), []
    for path in SHARED_MEMORY.iterdir():
        with suppress(OSError):
            file = path.lstat()
            if file.st_ino in inodes and file.st_ctime >= began:
                found.append(path)
    return found


def _family() -> set[psutil.Process]:
    """Ray's workers below this process, and everything below them."""
    below = psutil.Process().children(recursive=True)
    workers = [process for process in below if _is_worker(process)]
    return {process for worker in workers for process in [worker, *_children(worker)]}


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        title = " ".join(process.cmdline())
        return title.startswith("ray::") and not title.startswith(AGENTS)
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        children: list[psutil.Process] = process.children(recursive=True)
        return children
    return []
