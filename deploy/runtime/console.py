"""Terminal output of a command: one line for each phase, then one line that is updated in place.

Without a terminal (a log file, CI) the progress appears as plain lines at intervals. Everything is
also logged, every step included, which `log_to` writes to a file.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from deploy.errors import Interrupted
from deploy.runtime.safe_console import CleanFormatter, SafeConsole, clean
from headway.errors import HeadwayError, InputError

PLAIN_SECONDS = 10.0
"""Interval between two plain lines of progress where there is no terminal."""
FINISH_SECONDS = 2.0
"""Deadline for the last lines of a log to be written; the disk may hang."""

log = logging.getLogger(__name__)


class _LogFile(QueueHandler):
    """Appends to a file in a thread of its own, and drops lines that a disk does not take."""

    def __init__(self, file: Path) -> None:
        super().__init__(SimpleQueue())
        self.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
        self._thread = threading.Thread(target=self._write, args=(file,), daemon=True, name="log")
        self._thread.start()

    def finish(self) -> None:
        """Wait until everything is written, before a deadline."""
        self.queue.put_nowait(None)
        self._thread.join(FINISH_SECONDS)

    def _write(self, file: Path) -> None:
        for record in iter(self.queue.get, None):
            with suppress(OSError), file.open("ab", buffering=0) as output:
                output.write(f"{record.getMessage()}\n".encode(errors="backslashreplace"))


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append to a file, during the block, what is printed and what this process logs.

    An exception that ends the block is logged with its traceback; that of an interrupt or of bad
    input only with the message that the user sees.
    """
    root, handler = logging.getLogger(), _LogFile(file)
    handlers = [handler] if root.handlers else [handler, logging.lastResort or handler]
    level = log.level
    for added in handlers:
        root.addHandler(added)
    log.setLevel(logging.INFO)
    try:
        yield
    except BaseException as error:
        code = error.exit_code if isinstance(error, HeadwayError) else None
        by_user = code in (InputError.exit_code, Interrupted.exit_code)
        if by_user or isinstance(error, KeyboardInterrupt):
            ended, trace = str(error) or "stopped by the user", None
        else:
            ended, trace = f"ended by {type(error).__name__}", sys.exc_info()
        handler.handle(log.makeRecord(log.name, logging.ERROR, "", 0, ended, (), trace))
        raise
    finally:
        log.setLevel(level)
        for added in handlers:
            root.removeHandler(added)
        handler.finish()


class Terminal:
    """Prints phases and progress: `with terminal.bar(…): terminal.advance(done, text)`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or SafeConsole()
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._total = 0
        self._printed_at = -PLAIN_SECONDS

    def say(self, text: str) -> None:
        """Print a line that begins with the seconds since the command began."""
        text = clean(text)
        log.info(text)
        self._print(text)

    def _print(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        line = Text.assemble((f"{elapsed:6.1f} s", "dim"), "  ", text)
        self.console.print(line, soft_wrap=True)

    @contextmanager
    def bar(self, total: int, waiting_for: str) -> Iterator[None]:
        """Show the progress line while the block runs."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TextColumn("· left"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            bar.add_task(waiting_for, total=total)
            self._bar, self._total = bar, total
            yield
        self._bar = None

    def advance(self, done: int, text: str) -> None:
        """Set the progress to `done` steps, described by `text`."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=text)
        step = clean(f"step {done}/{self._total} · {text}")
        log.info(step)
        now = time.monotonic()
        due = now - self._printed_at > PLAIN_SECONDS or done in (1, self._total)
        if due and not self.console.is_terminal:
            self._printed_at = now
            self._print(step)
