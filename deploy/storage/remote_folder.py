"""Folders on object stores, by addresses of fsspec: s3://bucket/folder, gs://…, hf://….

    each file ─▶ copied ─▶ read back and compared ─▶ again, after a pause ─▶ … ─▶ checksums.json

A remote folder without `checksums.json`, which is copied last, is incomplete.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from headway.errors import HeadwayError, InputError
from headway.folder_checksums import FILE_NAME, checksum_in, checksum_of

T = TypeVar("T")
ATTEMPTS = 5
"""Most attempts for one file."""
FIRST_PAUSE = 1.0
"""Seconds after the first failure; they double with each."""
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+")
VERSION = re.compile(r"v\d+")


class UploadFailed(HeadwayError):
    """A file could not be copied to an address, or was not there as it had been written."""


class RemoteFolder:
    """A folder at an address; raises InputError for one that cannot be used."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        local = self.address.startswith(("file://", "local://"))
        options = {"auto_mkdir": True} if local else {}  # a store makes no bucket for a slip
        try:
            self._store, self._path = fsspec.core.url_to_fs(self.address, **options)
        except (ImportError, ValueError, OSError) as error:
            raise InputError(f"{address} cannot be used: {error}") from error

    def check(self, *, absent: bool = False) -> None:
        """Write and remove a small file; raise InputError if that fails, or it is not `absent`."""
        probe = f"{self._path}/.probe-{secrets.token_hex(4)}"
        try:
            exists = absent and self._store.exists(self._path)
            if not exists:
                self._store.pipe_file(probe, b"headway")
                self._store.rm_file(probe)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.address} cannot be written: {problem}") from error
        if exists:
            raise InputError(f"{self.address} exists; name a folder that does not")

    def upload(self, folder: Path, name: str = "") -> bool:
        """Copy a folder with checksums, or complete its copy; return False if it was there, whole.

        Raises UploadFailed after ATTEMPTS for a file, and FileNotFoundError if a file of the folder
        is not there any more.
        """
        target = f"{self._path}/{name}" if name else self._path
        last = checksum_of(folder / FILE_NAME)
        checksums: dict[str, str] = json.loads((folder / FILE_NAME).read_bytes())
        if (there := self._repeat(FILE_NAME, lambda: self._checksum(target, FILE_NAME))) == last:
            return False
        if there is not None:  # that of another content: what follows is incomplete
            self._repeat(FILE_NAME, lambda: self._store.rm_file(f"{target}/{FILE_NAME}"))
        for file, checksum in [*checksums.items(), (FILE_NAME, last)]:

            def copy(file: str = file, checksum: str = checksum) -> None:
                self._store.put_file(str(folder / file), f"{target}/{file}")
                if (arrived := self._checksum(target, file)) != checksum:
                    raise OSError(f"{arrived} has arrived of {checksum}")

            if not (folder / file).exists():
                raise FileNotFoundError(f"{folder / file} is not there any more")
            self._repeat(file, copy)
        return True

    def keep_only(self, names: Collection[str]) -> None:
        """Remove the copies of checkpoints whose names are not among these."""

        def remove() -> None:
            self._store.invalidate_cache()
            for path in self._store.ls(self._path, detail=False):
                name = path.rstrip("/").rpartition("/")[2]
                if VERSION.fullmatch(name) and name not in names:
                    self._store.rm(path, recursive=True)

        self._repeat("the removal of old checkpoints", remove)

    def _checksum(self, target: str, file: str) -> str | None:
        """Return the checksum of a file there; None if there is none."""
        self._store.invalidate_cache()
        try:
            with self._store.open(f"{target}/{file}", "rb") as opened:
                return checksum_in(opened)
        except FileNotFoundError:
            return None

    def _repeat(self, what: str, attempt: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return attempt()
            except Exception as error:  # each store has errors of its own
                failures += 1
                if failures == ATTEMPTS:
                    raise UploadFailed(
                        f"{self.address}: {what} failed in {ATTEMPTS} attempts, at last by "
                        f"{type(error).__name__}: {error}"
                    ) from error
            time.sleep(FIRST_PAUSE * 2 ** (failures - 1))
