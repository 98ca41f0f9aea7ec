"""Deadlines that follow from bytes and progress, so that they hold for models of any size."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

LEAST_BYTES_PER_SECOND = 25e6
"""A transfer counts as stalled when it is slower than this."""
LEAST_SWAPPED_BYTES_PER_SECOND = 250e6
"""A swap, whose bytes are on the engine's node already, counts as stalled below this."""
STREAMS = 4
"""Buckets that a publisher writes, or a receiver opens, at the same time."""


def allowance(timeout: float, nbytes: int, rate: float = LEAST_BYTES_PER_SECOND) -> float:
    """Return the seconds that a step may take which moves bytes and shows nothing meanwhile."""
    return timeout + nbytes / rate


def show(seconds: float) -> str:
    """Return a number of seconds for a message."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


class Progress:
    """The step that a transfer has reached, and when; may be used by several threads."""

    def __init__(self, timeout: float) -> None:
        """Start; `timeout` is the longest time without progress, beside that of bytes."""
        self._timeout = timeout
        self.reach("it has not begun")

    def reach(self, step: str, nbytes: int = 0, *, seconds: float = 0.0) -> None:
        """Start the time again; until the next call `nbytes` are moved, and `seconds` waited."""
        self._step, self._seconds = (step, time.monotonic(), nbytes), seconds

    def remaining(self, timeout: float | None = None) -> float:
        """Return the seconds until the deadline, negative after it; `timeout` replaces its own."""
        return self._step[1] + self._longest(timeout) - time.monotonic()

    def late(self, timeout: float | None = None) -> str | None:
        """Return a description of the stalled step if the deadline has passed, else None."""
        if self.remaining(timeout) > 0:
            return None
        return f"within {show(self._longest(timeout))} s of the last progress: {self._step[0]}"

    def _longest(self, timeout: float | None) -> float:
        timeout = self._timeout if timeout is None else timeout
        return allowance(timeout + self._seconds, self._step[2])


def run_in_streams(
    progress: Progress,
    step: str,
    tasks: Sequence[Callable[[], T]],
    sizes: Sequence[int],
    undo: Callable[[T], None] = lambda _: None,
) -> list[T]:
    """Run tasks, `STREAMS` at a time in daemon threads, and return their results in order.

    Each moves one bucket, of the given size, which is `step` then. If one fails, `undo` is called
    with every result, and its error is raised.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    numbers, at_once = iter(range(len(tasks))), sum(sorted(sizes)[-STREAMS:])

    def work() -> None:
        for number in numbers:
            try:
                results[number] = tasks[number]()
            except BaseException as error:  # noqa: BLE001  (raised by the caller's thread)
                errors.append(error)
            if errors:
                return
            progress.reach(f"{len(results)} of {len(tasks)} buckets are {step}", at_once)

    progress.reach(f"no bucket of {len(tasks)} is {step}", at_once)
    threads = [threading.Thread(target=work, daemon=True) for _ in tasks[:STREAMS]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        for result in results.values():
            undo(result)
        raise errors[0]
    return [results[number] for number in range(len(tasks))]
