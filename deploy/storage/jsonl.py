"""Writes the JSON-lines files of a run, which are logs: drops records while its disk is full."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from deploy.storage.run_directory import RunDirectory
from headway.full_disk import is_full


class JsonlWriter:
    """Appends records to the files of a run, from any thread; reports dropped records by `say`."""

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._directory, self._say = directory, say
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def write(self, name: str, records: Iterable[Any]) -> None:
        """Append records to a file: all of them, or none if the disk is full.

        Raises:
            OSError: The file cannot be written for another reason.
        """
        records = [*records]
        if not records:
            return
        with self._lock:
            try:
                self._directory.append(name, records)
            except OSError as error:
                if not is_full(error, self._directory.path):
                    raise
                if not self._dropped[name]:
                    self._say(f"the disk is full: records of {name} are dropped until it is not")
                self._dropped[name] += len(records)
            else:
                if dropped := self._dropped.pop(name, 0):
                    self._say(f"{dropped} records of {name} were dropped while the disk was full")
