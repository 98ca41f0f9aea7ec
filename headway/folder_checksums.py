"""Checksums of all files of a folder, in its file `checksums.json`.

They detect damage, and files that are missing or were added. They do not detect malice: whoever
can write the folder can write its checksums.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import SEEK_END, BufferedIOBase
from pathlib import Path

import xxhash

FILE_NAME = "checksums.json"
THREADS = 4
"""Files that are read at once; hashing does not hold the interpreter's lock."""


def checksum_of(file: Path) -> str:
    """Return the size in bytes and the xxh3_128 of a file, as "SIZE-DIGEST"."""
    with file.open("rb") as opened:
        return checksum_in(opened)


def checksum_in(opened: BufferedIOBase) -> str:
    """Return the checksum of an open file, as `checksum_of` has it."""
    digest = hashlib.file_digest(opened, xxhash.xxh3_128)
    return f"{opened.seek(0, SEEK_END)}-{digest.hexdigest()}"


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files that have checksums, relative to the folder, sorted.

    These are all but `checksums.json` itself and those whose names begin with a dot.
    """
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    return sorted({path.relative_to(folder).as_posix() for path in files} - {FILE_NAME})


def compute(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the checksums of files by their paths, relative to the folder."""
    names = [*names]
    with ThreadPoolExecutor(THREADS) as threads:
        checksums = threads.map(lambda name: checksum_of(folder / name), names)
        return dict(zip(names, checksums, strict=True))


def damage_of(folder: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """Return the first difference of a folder from its checksums, with the file; None without any.

    One of several callers reads every `parts`-th file only, from the `part`-th on.
    """
    try:
        recorded: Mapping[str, str] = json.loads((folder / FILE_NAME).read_bytes())
        names = files_of(folder)
        if missing := sorted(set(recorded).difference(names)):
            return f"{missing[0]} is missing"
        if added := sorted(set(names).difference(recorded)):
            return f"{added[0]} was added after it was written"
        computed = compute(folder, names[part::parts])
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error}"
    except (ValueError, TypeError, RecursionError) as error:
        return f"{FILE_NAME} is damaged: {error}"
    differ = (name for name, checksum in computed.items() if recorded[name] != checksum)
    return next((f"{name} is damaged: it is not as it was written" for name in differ), None)
