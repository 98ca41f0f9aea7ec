"""The output of Ray's workers, in files that are named after what the workers were.

Ray names the files of a worker by random ids. It writes lines such as `:actor_name:actor-0` into
them, with the `repr` of the actor, when an actor is made.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from deploy.cluster.cleanup import left_folders, remove_folder
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import FILE
from headway.clean_text import printable, without_secrets

log = logging.getLogger(__name__)
ACTOR = b":actor_name:"
MARKS = (ACTOR, b":job_id:", b":task_name:")
"""Beginnings of lines that are Ray's own."""
HEAD_BYTES = 2**16
"""Part of a file in which the actor's name is searched."""
LONGEST_NAME = 100
"""Bytes of an actor's name: whatever a worker prints may look like one."""
TAIL_BYTES = 2**20
"""Part of a file that is shown at most."""


def worker_logs(folder: Path) -> list[tuple[str, Path]]:
    """Return the name that each non-empty file of a worker in a folder of Ray's gets, oldest first.

    Example:
        [("broker.out", PosixPath("…/worker-052be0b9…-01000000-11535.out")), …]
    """
    files = [file for file in folder.glob("worker-*") if next(_lines(file), None) is not None]
    files.sort(key=lambda file: file.stat().st_mtime)
    return [(f"{_role(file)}{file.suffix}", file) for file in files]


def collect_worker_logs(source: Path, target: Path) -> None:
    """Append the workers' output in `source` to `actor-0.out` … in `target`; report disk errors."""
    with _reported(target):
        for name, file in worker_logs(source):
            with (target / name).open("ab") as opened:
                opened.write(f"--- {describe(file)}\n".encode())
                opened.writelines(map(_clean, _lines(file)))


def collect_ray_logs(source: Path, target: Path) -> None:
    """Copy what Ray's own processes printed, such as `ray-raylet.out`, which tells of failures."""
    for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
        with _reported(target), suppress(FileNotFoundError):
            lines = (source / name).read_bytes().splitlines()
            (target / f"ray-{name}").write_bytes(b"".join(map(_clean, lines)))


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Report an error of the operating system in the block, instead of raising it."""
    try:
        yield
    except OSError as error:
        log.warning("the output of processes is not all in %s: %s", folder, error)


def end_killed_session(directory: RunDirectory) -> None:
    """Collect the output of a run's last session if it was killed, and remove Ray's folders."""
    source = _newest_ray_logs(directory)
    for folder in left_folders(directory.path):
        if source is not None and folder in source.parents:
            collect_worker_logs(source, directory.logs)
        remove_folder(folder)


def _newest_ray_logs(directory: RunDirectory) -> Path | None:
    """Return the folder where Ray kept the output of a run's last session, if it was started."""
    sessions = directory.rows(FILE)
    path = sessions[-1].get("ray_logs") if sessions else None
    return Path(path) if path else None


def logs_of(directory: RunDirectory) -> list[tuple[str, Path]]:
    """Return name and path of every log of a run.

    While it goes on, and after a kill, those of its last session are still with Ray.
    """
    files = [(file.name, file) for file in sorted(directory.logs.glob("[!.]*"))]
    kept = _newest_ray_logs(directory)
    if kept is not None and directory.status() in ("running", "killed"):
        files += worker_logs(kept)
    return files


def newest_lines(file: Path, count: int) -> str:
    """Return the last lines of a file, of the last TAIL_BYTES at most."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
        text = opened.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-count:])


def describe(file: Path) -> str:
    """Return the process id of a worker's file and the time of its last output."""
    ended = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    return f"pid {file.stem.rpartition('-')[2]}, until {ended:%Y-%m-%d %H:%M:%S} UTC"


def _role(file: Path) -> str:
    with file.open("rb") as opened:
        marks = [line for line in opened.read(HEAD_BYTES).splitlines() if line.startswith(ACTOR)]
    if not marks:
        return "worker"
    name = marks[-1].removeprefix(ACTOR)[:LONGEST_NAME].decode(errors="replace")
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)


def _clean(line: bytes) -> bytes:
    text = without_secrets(line.decode(errors="replace").rstrip("\r\n"))
    return printable(text.replace("\r", "\n")).encode() + b"\n"


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file but Ray's own."""
    with file.open("rb") as opened:
        yield from (line for line in opened if not line.startswith(MARKS))
