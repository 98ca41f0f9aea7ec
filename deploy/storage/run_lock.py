"""The locks of a run: one command at a time works on it, makes, replaces or deletes its folder."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from deploy.runtime import session_process
from headway.errors import InputError
from headway.file_lock import is_held, locked
from queues.readers.open_run import is_open

NAMING_SECONDS = 2.0
"""Longer than a command takes to create a folder, or to delete one."""


class RunMissing(InputError):
    """There is no run of a name."""


class RunLock:
    """The locks of the run in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / session_process.DRIVER_LOCK
        self._parent = folder / session_process.PARENT_LOCK

    def named(self) -> AbstractContextManager[int]:
        """Return a lock without which no folder of this name is made, replaced or deleted."""
        file = self.folder.with_name(f".{self.folder.name}.lock")
        return locked(file, passing=True, parents=True, seconds=NAMING_SECONDS)

    @contextmanager
    def taken(self) -> Iterator[int]:
        """Lock the folder, without a look at its processes, and yield the lock's descriptor."""
        with locked(self.file) as descriptor:
            _sign(descriptor)
            yield descriptor

    @contextmanager
    def held(
        self, end_leftovers: Callable[[Path], None] | None = None, *, is_again: bool = False
    ) -> Iterator[None]:
        """Keep other commands out of the run during the block.

        `end_leftovers` is called with the folder, to end what a session that was killed has left. A
        session that was started again after a crash `is_again` that of its parent. Raises
        InputError if another command works on the run, and RunMissing if one has deleted it.
        """
        if not is_again and is_held(self._parent):
            raise self.going_on(by_signer=True)  # perhaps between two sessions of a command
        with ExitStack() as hold:
            try:
                descriptor = hold.enter_context(locked(self.file))
            except BlockingIOError:
                raise self.going_on(by_signer=True) from None
            except FileNotFoundError:
                raise RunMissing(f"there is no run in {self.folder} any more") from None
            if end_leftovers is not None:
                end_leftovers(self.folder)
            if is_open(self.folder):
                raise self.going_on()
            _sign(descriptor)
            yield

    def rests(self) -> bool:
        """Return True if no process works on the run."""
        return not (is_held(self.file) or is_held(self._parent) or is_open(self.folder))

    def check_at_rest(self) -> None:
        """Refuse a run that a process works on, by an InputError."""
        if not self.rests():
            raise self.going_on()

    def going_on(self, *, by_signer: bool = False) -> InputError:
        """Return the error of a run that is going on; names the process that signed its lock."""
        holder = ""
        if by_signer:
            with suppress(OSError):
                holder = self.file.read_text(errors="replace")
        return InputError(
            f"a run named {self.folder.name!r} is going on in {self.folder.parent}{holder}; choose "
            "another name, or wait for its end"
        )


def _sign(descriptor: int) -> None:
    """Write into a lock that is held which process of which machine holds it."""
    with suppress(OSError):  # the disk is full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f" (process {os.getpid()} on {socket.gethostname()})".encode(), 0)
