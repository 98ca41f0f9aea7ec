"""Standard output that ends nothing: what cannot be written is dropped.

A pipe may be closed, a terminal lost or stopped (Ctrl-S), a disk full, an encoding too small.
"""

import atexit
import codecs
import io
import locale
import os
import queue
import select
import sys
import threading
from contextlib import suppress
from typing import TextIO, cast

FORCING = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables that have libraries write escape codes anywhere."""
STALL_SECONDS = 0.2
"""Longest wait of a writer for a reader that does not read, once until it reads again."""
END_SECONDS = 5.0
"""The same for the end of the process."""
WAITING = 1000
"""Texts that wait for such a reader, before further ones are dropped."""


def open_standard_streams() -> None:
    """Open those of the descriptors 0 to 2 that are closed, so that no other file takes them.

    Characters that the encoding lacks are replaced from now on, by processes that start, too.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
        os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:replace"


def use_utf8() -> None:
    """Start this process anew if it would read files as something else than UTF-8.

    The locale decides on that, except in Python's UTF-8 mode, which processes that it starts get.
    """
    os.environ["PYTHONUTF8"] = "1"
    if not sys.flags.utf8_mode and codecs.lookup(locale.getencoding()).name != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def keep_codes_to_terminals() -> None:
    """Have no library write escape codes of a terminal where output or errors go elsewhere.

    It holds for this process and for those that it starts, whatever forces codes (CI services do).
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        for name in FORCING:
            os.environ.pop(name, None)
        os.environ |= {"NO_COLOR": "1", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}


def tolerant(stream: TextIO) -> TextIO:
    """Return a stream that writes to another one, and neither raises nor waits for long."""
    return cast("TextIO", _Output(stream))


class _Output(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue(WAITING)
        self._stalled = False
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):
            self._descriptor = None
        if self._descriptor is not None:
            threading.Thread(target=self._follow, name="output", daemon=True).start()
            atexit.register(self._wait, END_SECONDS)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._texts.append(text)
        if self._descriptor is None or "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        texts, self._texts = self._texts, []
        if not texts:
            return
        if self._descriptor is None:
            with suppress(OSError, ValueError):
                self._stream.write("".join(texts))
                self._stream.flush()
            return
        with suppress(queue.Full):
            self._queue.put_nowait("".join(texts))
        self._wait(0.0 if self._stalled else STALL_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait until everything is written."""
        with self._queue.all_tasks_done:
            written = self._queue.all_tasks_done.wait_for(
                lambda: not self._queue.unfinished_tasks, seconds
            )
        self._stalled = not written

    def _follow(self) -> None:
        """Write what is put into the queue, past the buffer of the stream and its lock."""
        assert self._descriptor is not None
        while True:
            data = self._queue.get().encode(self.encoding, "replace")
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])
                except OSError:
                    break
            self._queue.task_done()
