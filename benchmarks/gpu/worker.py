"""A process that computes parts of the suite, one after the other, each with a deadline."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from benchmarks.harness.record import Record

END_SECONDS = 10.0
"""Time that a process has to end by itself."""
LOG_LINES = 15
"""Last lines of the output of a part that failed: errors of CUDA end with five lines of advice."""
Call = tuple[str, str, str, int]
"""Function of a part as "module:name", size, device, rounds."""


class _Running(NamedTuple):
    process: SpawnProcess
    calls: Connection
    log: str


class Worker:
    """A process that starts with its first part, and anew after one that failed."""

    def __init__(self) -> None:
        self._running: _Running | None = None

    def outcome(self, call: Call, seconds: float) -> Record:
        """Return the figures of a part after at most so many seconds, and how it failed if so."""
        running = self._running = self._running or _start()
        begin = time.monotonic()
        figures: Record = {}
        try:
            running.calls.send(call)
            while running.calls.poll(max(0.0, begin + seconds - time.monotonic())):
                if (more := running.calls.recv()) is None:
                    return figures | {"part_seconds": time.monotonic() - begin}
                figures |= more
            failed = [f"took longer than {seconds:.0f} s"]
        except (EOFError, ConnectionError):
            running.process.join(END_SECONDS)
            with open(running.log, errors="replace") as log:
                lines = log.read().strip().splitlines()[-LOG_LINES:]
            failed = lines or [f"exit code {running.process.exitcode}"]
        self.close()
        return figures | {"failed": failed}

    def close(self) -> None:
        """End the process, and those that it started."""
        if self._running is None:
            return
        process, calls, log = self._running
        self._running = None
        calls.close()
        assert process.pid is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        os.unlink(log)


def _start() -> _Running:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with NamedTemporaryFile(delete=False) as log:
        process = context.Process(target=_serve, args=(theirs, log.name))
        process.start()
    theirs.close()
    return _Running(process, ours, log.name)


def _serve(calls: Connection, log: str) -> None:
    """Compute parts until one fails or the other end is closed; what is printed goes to `log`."""
    os.setsid()
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import torch

    while True:
        work, size, device, rounds = calls.recv()
        module, _, function = work.partition(":")
        for figures in getattr(importlib.import_module(module), function)(
            size, torch.device(device), rounds
        ):
            calls.send(figures)
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # for the processes of other parts
        calls.send(None)
