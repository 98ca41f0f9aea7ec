"""Rows of a run's JSON-lines files, written while the disk has room and kept while it has none.

Leaves out what the rows are (`recorder`, `restarts`), and how a file is appended to
(`run_directory`).
"""

import threading
from collections.abc import Iterable
from typing import Any

from deploy.storage.run_directory import RunDirectory
from queues.runtime.disk_space import is_full


class JsonlWriter:
    """Appends rows in order; what found no room comes with the next ones, of whichever file."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._kept: dict[str, list[Any]] = {}
        self._turn = threading.Lock()

    @property
    def kept(self) -> bool:
        """Whether some found no room."""
        return bool(self._kept)

    def write(self, name: str, rows: Iterable[Any]) -> None:
        """Appends rows to a file, or keeps them until the disk has room; from any thread.

        Raises:
            OSError: A file cannot be written for another reason.
        """
        with self._turn:
            self._kept.setdefault(name, []).extend(rows)
            self._append()

    def _append(self) -> None:
        for file in [*self._kept]:
            try:
                self._directory.append(file, self._kept[file])
            except OSError as error:
                if not is_full(error, self._directory.path):
                    raise
            else:
                del self._kept[file]
