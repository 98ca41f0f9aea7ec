"""Ends Ray's workers on this machine, and removes the files and the memory that Ray would leave.

Workers that are killed cannot remove named shared memory, such as vLLM's message queues, which
would then stay until the machine restarts. Python's resource trackers are left to end by
themselves: they remove the shared memory of processes that are dead already. Where Ray kills them
too, as with an actor whose engine was killed, the driver removes what all who held it have left.

Orphans, whose parents below this process have died, become its children, since process 1 may reap
none. A zombie that is seen twice is one that nobody waits for: those who start a process here wait
for its end at once.
"""

import ctypes
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from deploy.runtime.session_process import MARK
from queues.readers.open_run import is_open

SHARED_MEMORY = Path("/dev/shm")
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own helper processes, without which it takes the whole node for dead."""

TRACKER = "multiprocessing.resource_tracker"
"""Part of the command line of Python's resource trackers, which remove leaked shared memory."""
_MAPPED = re.compile(rf"(\d+) +{SHARED_MEMORY}/", re.MULTILINE)
"""Inode of a shared memory file in a line of /proc/<pid>/maps."""

PRIVATE = "headway-"
"""Beginning of the names of private folders."""
OWNER, HELD = "owner.json", "shared_memory.json"
"""Files there: the session that made it, and the named shared memory of its processes, by inode."""
LONGEST_BASE = 22
"""Bytes of the path of a folder in which Ray can make its sockets, of 107 with what it adds:
headway-12345678/ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store."""
LOOK_SECONDS = 0.5
"""Interval of looks for names of shared memory that are new, or held by nobody any more."""

LEFT_SECONDS = 60.0
"""Deadline for the processes of a killed session to end, on other nodes too."""
HALT_SECONDS = 5.0
"""Deadline for processes to stop; until then they could create another file."""
END_SECONDS = 2.0
"""Deadline for killed processes to be gone."""
PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def ending_workers() -> Iterator[None]:
    """Stop every Ray worker below this process and its children; kill them after the block.

    Ray is to be shut down in the block: it prints errors about workers that die before it does.
    """
    stopped: set[psutil.Process] = set()
    trackers: set[psutil.Process] = set()
    files: list[Path] = []
    try:
        while new := _family() - stopped - trackers:  # started before their parent stopped
            trackers |= {process for process in new if TRACKER in _command(process)}
            new -= trackers
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            _await_none(_runs, new, HALT_SECONDS)
            stopped |= new
        files = mapped_files(process.pid for process in stopped)
        yield
    finally:
        _end(stopped, files, beside=trackers)


def _end(
    processes: Set[psutil.Process], files: Iterable[Path], beside: Set[psutil.Process] = frozenset()
) -> None:
    """Kill processes, wait for their end and that of others `beside` them, and remove files."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _await_none(lives, processes | beside, END_SECONDS)
    for path in files:
        path.unlink(missing_ok=True)


def _await_none(
    still: Callable[[psutil.Process], bool], processes: Iterable[psutil.Process], seconds: float
) -> None:
    """Wait until `still` is false for every process, at most for `seconds`."""
    deadline = time.monotonic() + seconds
    while any(still(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    """Return True if a thread of the process is neither stopped nor gone."""
    with suppress(OSError):
        states = [
            stat.read_text().rpartition(")")[2].split()[0]
            for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")
        ]
        return any(state not in "TtZX" for state in states)
    return False


def lives(process: psutil.Process) -> bool:
    """Return True unless a process has ended, reaped or not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def end_leftovers(run: Path) -> None:
    """Kill what a killed session of a run has left on this machine, and wait for its broker's end.

    Only whoever holds the run may call it. On a cluster that the session had joined, Ray ends the
    processes.
    """
    mark, deadline = f"{MARK}={run}".encode(), time.monotonic() + LEFT_SECONDS
    while left := {process for process in psutil.process_iter() if _is_left(process, mark)}:
        files = mapped_files((process.pid for process in left), since=0.0)
        _end(left, files)
        if time.monotonic() > deadline:
            return
    while is_open(run) and time.monotonic() < deadline:
        time.sleep(0.1)


def _is_left(process: psutil.Process, mark: bytes) -> bool:
    """Return True if a process inherited a mark; trackers of shared memory end by themselves."""
    with suppress(OSError):
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return mark in environment.split(b"\0") and TRACKER not in _command(process)
    return False


def mapped_files(pids: Iterable[int], since: float | None = None) -> list[Path]:
    """Return mapped files in /dev/shm, none older than `since`, by default this process's start."""
    inodes: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    began, mapped = psutil.Process().create_time() if since is None else since, []
    for path in SHARED_MEMORY.iterdir():
        with suppress(OSError):
            file = path.lstat()
            if file.st_ino in inodes and file.st_ctime >= began:
                mapped.append(path)
    return mapped


def _family() -> set[psutil.Process]:
    """Return Ray's workers below this process, and every process below them."""
    family: set[psutil.Process] = set()
    for process in psutil.Process().children(recursive=True):
        command = _command(process)
        if command.startswith("ray::") and not command.startswith(AGENTS):
            with suppress(psutil.NoSuchProcess):
                family |= {process, *process.children(recursive=True)}
    return family


def _command(process: psutil.Process) -> str:
    """Return the command line, or the title that replaced it; "" if the process is gone."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def reaping_orphans(interval: float = 10.0) -> Iterator[None]:
    """Adopt orphans during the block and reap them, every `interval` seconds and at its end."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seen: set[psutil.Process] = set()

    def reap() -> None:
        nonlocal seen
        zombies = _zombies()
        _reap(zombies & seen)
        seen = zombies

    try:
        with _repeated(reap, interval):
            yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        _reap(_zombies())


@contextmanager
def removing_memory(folder: Path, interval: float = LOOK_SECONDS) -> Iterator[None]:
    """Remove named shared memory of Ray's workers below this process once its holders are dead.

    What they hold is written to a private folder, so that a killed session leaves none either.
    """
    holders: dict[tuple[int, str], set[psutil.Process]] = defaultdict(set)
    seen: set[Path] = set()
    scans = 1  # still to do: two after a new name, which its process maps a moment later

    def look() -> None:
        nonlocal seen, scans
        present = {*SHARED_MEMORY.iterdir()}
        seen, scans = present, 2 if present - seen else scans - 1
        for process in _family() if scans > 0 else ():
            for path in mapped_files([process.pid]):
                with suppress(OSError):
                    holders[path.stat().st_ino, str(path)].add(process)
        left = [file for file, processes in holders.items() if not any(map(lives, processes))]
        _remove_unmapped(left)
        for file in left:
            del holders[file]
            scans = 2  # another process may hold it by now
        if scans > 0:
            (folder / HELD).write_text(json.dumps([*holders]))

    with _repeated(look, interval):
        yield


def _remove_unmapped(files: Iterable[tuple[int, str]]) -> None:
    """Remove named shared memory, given as inode and path, that no process has mapped."""
    if files := [*files]:
        mapped = {*mapped_files(psutil.pids(), since=0.0)}
        for inode, name in files:
            with suppress(OSError):
                if Path(name) not in mapped and Path(name).stat().st_ino == inode:
                    Path(name).unlink()


@contextmanager
def _repeated(action: Callable[[], None], interval: float) -> Iterator[None]:
    """Call a function before, every `interval` seconds during, and after the block.

    An OSError passes, as of a full disk.
    """
    ended = threading.Event()

    def act() -> None:
        with suppress(OSError):
            action()

    def repeat() -> None:
        while not ended.wait(interval):
            act()

    act()
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        act()


def _zombies() -> set[psutil.Process]:
    return {process for process in psutil.Process().children() if not lives(process)}


def _reap(zombies: set[psutil.Process]) -> None:
    for process in zombies:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


@contextmanager
def private_folder(run: Path) -> Iterator[Path]:
    """Make a folder for Ray's files that only this user may enter, for the time of the block.

    A session that goes on with the run removes it, if this one is killed.
    """
    # Ray lets everybody write to the folders that it makes.
    folder = Path(tempfile.mkdtemp(prefix=PRIVATE, dir=_base()))
    try:
        (folder / OWNER).write_text(json.dumps(_owner(run, os.getpid())))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def left_folders(run: Path) -> list[Path]:
    """Return the private folders that killed sessions of a run have left on this machine."""
    left = []
    for file in Path(_base()).glob(f"{PRIVATE}*/{OWNER}"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            owner = json.loads(file.read_text())
            ours = file.lstat().st_uid == os.getuid() and owner["run"] == str(run.resolve())
            here = owner["host"] == socket.gethostname()
            if ours and here and owner != _owner(run, owner["pid"]):
                left.append(file.parent)
    return left


def remove_folder(folder: Path) -> None:
    """Remove a private folder that was left, and the named shared memory that is noted in it."""
    with suppress(OSError, ValueError):
        _remove_unmapped((inode, name) for inode, name in json.loads((folder / HELD).read_text()))
    shutil.rmtree(folder, ignore_errors=True)


def _base() -> str:
    """Return the folder of private ones: /tmp where the one set is too long for Ray's sockets."""
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= LONGEST_BASE else "/tmp"


def _owner(run: Path, pid: int) -> dict[str, str | int]:
    """Return what a session of a run is known by: a later process may have its number."""
    started = ""
    with suppress(OSError):
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    host = socket.gethostname()
    return {"run": str(run.resolve()), "host": host, "pid": pid, "started": started}
