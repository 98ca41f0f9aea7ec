"""What the processes of a run hold, seen from outside."""

from pathlib import Path

from deploy.cluster.cleanup import AGENTS
from tests.deploy.conftest import MARK


def processes_of(folder):
    """Command lines of living processes that were started for a run in this folder.

    Ray's own agents are left out: after the driver's SIGKILL they take a minute to notice.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            status = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if status != "Z" and f"{MARK}={folder}".encode() in environment.split(b"\0"):
            found.append((path / "cmdline").read_text())
    return [title for title in found if not title.startswith(AGENTS)]


def open_shared_memory():
    """Anonymous shared memory of weights that some process still holds."""
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if "memfd:headway" in target:
            held.add((link.parts[2], target))
    return held
