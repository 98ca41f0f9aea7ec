"""Deadlines that follow from bytes and progress, so that they hold for models of any size."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

LEAST_BYTES_PER_SECOND = 25e6
"""A transfer counts as stalled when it is slower than this."""
STREAMS = 4
"""Buckets that a publisher writes, or a receiver opens, at the same time."""


def allowance(timeout: float, nbytes: int) -> float:
    """Return the seconds that a step may take which moves bytes and shows nothing meanwhile."""
    return timeout + nbytes / LEAST_BYTES_PER_SECOND


def show(seconds: float) -> str:
    """Return a number of seconds for a message."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


class Progress:
    """The step that a transfer has reached, and when; may be used by several threads.

    Args:
        timeout: Longest time in seconds without progress, beside the `allowance` for bytes.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.reach("it has not begun")

    def reach(self, step: str, nbytes: int = 0) -> None:
        """Start the time again; `nbytes` are moved until the next call."""
        self._step = step, time.monotonic(), nbytes

    def remaining(self, timeout: float | None = None) -> float:
        """Return the seconds until the deadline, negative after it; `timeout` replaces its own."""
        _, since, nbytes = self._step
        longest = allowance(self._timeout if timeout is None else timeout, nbytes)
        return since + longest - time.monotonic()

    def late(self, timeout: float | None = None) -> str | None:
        """Return a description of the stalled step if the deadline has passed, else None."""
        if self.remaining(timeout) > 0:
            return None
        step, _, nbytes = self._step
        longest = allowance(self._timeout if timeout is None else timeout, nbytes)
        return f"within {show(longest)} s of the last progress: {step}"


def run_in_streams(
    progress: Progress,
    step: str,
    tasks: Sequence[Callable[[], T]],
    sizes: Sequence[int],
    undo: Callable[[T], None] = lambda _: None,
) -> list[T]:
    """Run tasks, `STREAMS` at a time in daemon threads, and return their results in order.

    Args:
        progress: Is told of each task that is done.
        step: What has happened to a bucket then, for the description of a stall.
        tasks: Move one bucket each.
        sizes: Bytes of the buckets.
        undo: Called with every result if a task fails; its error is raised.
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
