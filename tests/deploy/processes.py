"""What the processes of a run hold, seen from outside."""

from contextlib import suppress
from pathlib import Path

import psutil

from deploy.cluster.cleanup import AGENTS, SHARED_MEMORY, mapped_files
from tests.deploy.conftest import MARK
from tests.waiting import until


def started_for(folder):
    """Return the /proc folders of living processes that commands in this folder started."""
    living = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            status = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if status != "Z" and f"{MARK}={folder}".encode() in environment.split(b"\0"):
            living.append(path)
    return living


def processes_of(folder):
    """Return the command lines of the processes of runs in this folder.

    Ray's own agents are left out: after the driver's SIGKILL they take a minute to notice.
    """
    titles = []
    for path in started_for(folder):
        try:
            titles.append((path / "cmdline").read_text())
        except OSError:
            continue
    return [title for title in titles if not title.startswith(AGENTS)]


def open_shared_memory(folder):
    """Return the anonymous shared memory of weights that processes of these runs hold."""
    held = set()
    for path in started_for(folder):
        for link in path.glob("fd/*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if "memfd:headway" in target:
                held.add((path.name, target))
    return held


def wait_for_end(headway, seconds):
    """Wait until no process of the runs lives and no shared memory of theirs is held."""
    folder = headway.folder
    until(lambda: not (open_shared_memory(folder) or processes_of(folder)), seconds,
          output=lambda: str(processes_of(folder)))  # fmt: skip


def leaked_shared_memory(before):
    """Return the files of named shared memory that are new and that no living process has mapped.

    Files that are mapped belong to processes that live, which are not of a run that has ended.
    """
    new = {*SHARED_MEMORY.iterdir()} - before
    return new - {*mapped_files(psutil.pids())}


def titled(pid, title):
    """Return the processes below another one whose title begins so.

    Ray puts its own title in the place of ours for up to half a second after each call.
    """
    below = psutil.Process(pid).children(recursive=True)
    matching = []
    for process in below:
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(title):
                matching.append(process)
    return matching
