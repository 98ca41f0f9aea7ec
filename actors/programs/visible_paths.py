"""The paths that a program may read in its sandbox, whose root has nothing else of the machine."""

import glob
import os
import tempfile
from collections.abc import Iterable, Iterator

SYSTEM = """
/usr /bin /sbin /lib /lib32 /lib64 /libx32 /etc/alternatives /etc/ld.so.cache /etc/localtime
/etc/nsswitch.conf /etc/ssl/certs /etc/ssl/openssl.cnf
"""
"""What every program may read."""


def visible_paths(files: Iterable[str], folders: Iterable[str]) -> list[str]:
    """Return the paths of the system, of files with all that is beside them, and of folders."""
    beside = [folder_of(link) for file in files for link in links_of(file)]
    paths = [*SYSTEM.split(), *beside, *folders]
    return sorted({link for path in paths for link in links_of(path)})


def folder_of(file: str) -> str:
    """Return the folder of a file; the file alone where that has what belongs to others."""
    folder = os.path.dirname(file)
    private = os.path.expanduser("~"), tempfile.gettempdir()
    return file if any(os.path.commonpath([folder, one]) == folder for one in private) else folder


def links_of(path: str) -> Iterator[str]:
    """Yield a path, those that it is a link to, and that without any links in it."""
    yield path
    for _ in range(40):
        if not os.path.islink(path):
            break
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
        yield path
    yield os.path.realpath(path)


def runs_in(paths: Iterable[str]) -> list[str]:
    """Return the folders of runs, with what their models and agents did, up to two folders down."""
    system = tuple(f"{path}/" for path in SYSTEM.split())
    others = [glob.escape(path) for path in paths if not f"{path}/".startswith(system)]
    patterns = [f"{path}/{deep}" for path in others for deep in ("*", "*/*")]
    ledgers = [
        file
        for pattern in patterns
        for file in glob.glob(f"{pattern}/ledger.sqlite", include_hidden=True)
    ]
    return sorted({os.path.dirname(file) for file in ledgers})
