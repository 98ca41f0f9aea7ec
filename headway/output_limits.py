"""Limits of what foreign code prints: a rate where it is passed on, a size in log files."""

import fcntl
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from headway.clean_text import printable, without_secrets

LIMIT_BYTES = 64 << 10
"""Most bytes that pass in `LIMIT_SECONDS`."""
LIMIT_SECONDS = 60.0
LOG_BYTES = 16 << 20
"""Size at which a log file is cut."""
HEAD_BYTES, TAIL_BYTES = 1 << 16, 1 << 20
"""Beginning and end that a log file keeps."""
OVERLAP_BYTES = 1 << 12
"""End of what was searched for secrets that is searched again with what follows it."""
LOOK_SECONDS = 1.0


class RateLimit:
    """Limit of the output that may pass within a time; called from several threads."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._began, self._passed, self._dropped = time.monotonic(), 0, 0

    def allow(self, size: int) -> tuple[int, str]:
        """Return how many of so many bytes may pass, and a note on earlier ones that did not."""
        with self._lock:
            note = ""
            if time.monotonic() - self._began > LIMIT_SECONDS:
                if self._dropped:
                    note = f"[{self._dropped} bytes that {self._origin} printed are left out]\n"
                self._began, self._passed, self._dropped = time.monotonic(), 0, 0
            allowed = min(size, LIMIT_BYTES - self._passed)
            self._passed += allowed
            self._dropped += size - allowed
            return allowed, note


class LimitedStream:
    """A text stream that passes on what is printed, up to a limit, cleaned."""

    def __init__(self, stream: TextIO, limit: RateLimit) -> None:
        self._stream, self._limit = stream, limit

    def write(self, text: str) -> int:
        """Write as much of a text as is allowed now; return the length of all of it."""
        allowed, note = self._limit.allow(len(text))
        if note or allowed:
            end = "\n" if allowed < len(text) else ""
            lines = without_secrets(text[:allowed]).split("\r")  # progress bars return to its start
            self._stream.write(note + "\r".join(map(printable, lines)) + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def limited_output(origin: str) -> Iterator[None]:
    """Limit what is printed in the block, by `origin`, to the standard output and error."""
    limit = RateLimit(origin)
    with (
        redirect_stdout(LimitedStream(sys.stdout, limit)),
        redirect_stderr(LimitedStream(sys.stderr, limit)),
    ):
        yield


def keep_logs_small() -> None:
    """Keep the files that this process and its children print to small, and free of its secrets.

    A thread looks at them every LOOK_SECONDS; pipes, terminals and files that are not open for
    appending are left as they are.
    """
    for number in (1, 2):
        with suppress(OSError):
            appends = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND
            if appends and stat.S_ISREG(os.fstat(number).st_mode):
                file = LogFile(f"/proc/self/fd/{number}")
                threading.Thread(target=file.follow, name="log-limit", daemon=True).start()


class LogFile:
    """A log file that other code appends to."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  (until the process ends)
        self._clean = 0
        """Bytes from the beginning in which secrets are hidden."""

    def follow(self) -> None:
        """Look at the file until the process ends."""
        while True:
            time.sleep(LOOK_SECONDS)
            with suppress(OSError):
                self.look()

    def look(self) -> None:
        """Cut the file if it has grown too long, and hide the secrets in what is new."""
        size = os.fstat(self._file.fileno()).st_size
        if size > LOG_BYTES:
            self._cut(size)
            size = os.fstat(self._file.fileno()).st_size
        while self._clean < size:
            start = max(0, self._clean - OVERLAP_BYTES)
            self._file.seek(start)
            block = self._file.read(TAIL_BYTES)
            if start + len(block) <= self._clean:
                break  # somebody else cut it
            self._hide(start, block)
            self._clean = start + len(block)

    def _cut(self, size: int) -> None:
        """Leave out all but the beginning and the end; what is appended meanwhile may be lost."""
        self._file.seek(size - TAIL_BYTES)
        tail = self._file.read(TAIL_BYTES)
        left_out = size - HEAD_BYTES - len(tail)
        note = f"\n[{left_out} bytes are left out: the log was longer than {LOG_BYTES}]\n".encode()
        self._file.truncate(HEAD_BYTES)
        self._file.seek(HEAD_BYTES)
        self._file.write(note + tail)
        self._clean = min(self._clean, HEAD_BYTES)

    def _hide(self, start: int, block: bytes) -> None:
        """Overwrite secrets in place, with signs of the same length."""
        text = block.decode(errors="surrogateescape")
        if without_secrets(text) == text:
            return
        for line in block.splitlines(keepends=True):
            text = line.decode(errors="surrogateescape")
            if (clean := without_secrets(text)) != text:
                hidden = clean.encode(errors="surrogateescape").rstrip(b"\n")
                room = len(line.rstrip(b"\n"))
                self._file.seek(start)
                self._file.write(hidden[:room].ljust(room, b"*"))
            start += len(line)
