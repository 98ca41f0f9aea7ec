"""A disk that fills up while a checkpoint is written: who writes a file waits, and begins it anew.

Every rank waits where it is, so that ranks which meet in a collective operation meet later; after
that operation's own deadline the run ends. Leaves out the room that a checkpoint is expected to
need before it begins (`ray_lead`).
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from queues.room import PROBE_BYTES, has_room, is_full, no_room

log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0
"""How often a full disk is asked for room."""


def write_whole(path: Path, write: Callable[[], object]) -> None:
    """Calls `write`, again and again as long as the disk is full; other errors are raised.

    What was cut off is removed first, and at least as much room is waited for as it had taken.

    Args:
        path: The file that `write` makes, or the folder whose own files it makes.
        write: Makes all of it, and replaces what is there.
    """
    folder = path if path.is_dir() else path.parent
    while True:
        try:
            write()
        except Exception as error:
            # torch does not say why a write failed, so the disk is asked.
            if not is_full(error, folder) and has_room(folder):
                raise
            log.warning("paused: %s (%s: %s)", no_room(folder), path.name, error)
            room = PROBE_BYTES + _remove(path)
            while not has_room(folder, room):
                time.sleep(RETRY_SECONDS)
            log.warning("there is room again on the disk of %s", folder)
        else:
            return


def _remove(path: Path) -> int:
    """Removes a file, or the files of a folder; the bytes that they had."""
    files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.exists())
    for file in files:
        file.unlink(missing_ok=True)
    return size
