"""Ends Ray's workers on this machine, with the shared memory that they would leave behind.

Ray kills them without a word, and so does whoever runs out of time; named shared memory, such as
vLLM's message queues, would then stay until the machine restarts. Python's resource trackers are
left to end by themselves: they remove what processes that are dead already had named.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own helpers, without which it believes the whole node dead."""

TRACKER = "multiprocessing.resource_tracker"
"""In the command of a process that ends, and cleans up, when all who told it of files are gone."""
_MAPPED = re.compile(rf"(\d+) +{SHARED_MEMORY}/", re.MULTILINE)
"""A line of /proc/<pid>/maps: the inode, and where the file was when it was opened."""

HALT_SECONDS = 5.0
"""How long processes may take to stand still, in which they could make another file."""
END_SECONDS = 2.0
"""How long killed processes may take to be gone."""


@contextmanager
def ending_workers() -> Iterator[None]:
    """Halts every Ray worker below this process and all that each started; kills them afterwards.

    Ray is to be shut down in the block: workers that die before it does are mourned on the screen.
    """
    halted: set[psutil.Process] = set()
    trackers: set[psutil.Process] = set()
    left: list[Path] = []
    try:
        while new := _family() - halted - trackers:  # who was started before its parent was halted
            trackers |= set(filter(_is_tracker, new))
            new -= trackers
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            _await_none(_runs, new, HALT_SECONDS)
            halted |= new
        left = mapped_files(process.pid for process in halted)
        yield
    finally:
        for process in halted:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _await_none(_lives, halted | trackers, END_SECONDS)
        for path in left:
            path.unlink(missing_ok=True)


def _await_none(
    still: Callable[[psutil.Process], bool], processes: Iterable[psutil.Process], seconds: float
) -> None:
    """Returns when that is true of no process any more, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while any(still(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    """Whether a thread of it is neither halted nor gone."""
    with suppress(OSError):
        states = [
            stat.read_text().rpartition(")")[2].split()[0]
            for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")
        ]
        return any(state not in "TtZX" for state in states)
    return False


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


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return TRACKER in " ".join(process.cmdline())
    return False


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
