"""The limit of restarts in a row of a process that dies, and the wait before each of them."""

from dataclasses import dataclass

FIRST_WAIT_SECONDS = 1.0
"""Wait before the first restart in a row; each further wait is twice as long."""
LONGEST_WAIT_SECONDS = 30.0
SETTLED_SECONDS = 600.0
"""A process that worked for this long before its death starts counting anew."""


@dataclass(slots=True)
class RestartBudget:
    """The restarts of one process; `limit` is `deploy.max_restarts`."""

    limit: int
    in_a_row: int = 0

    def next_wait(self, *, settled: bool) -> float | None:
        """Return the seconds to wait before a restart, counted anew if `settled`; None: no more."""
        if settled:
            self.in_a_row = 0
        if self.in_a_row >= self.limit:
            return None
        self.in_a_row += 1
        return min(FIRST_WAIT_SECONDS * 2.0 ** (self.in_a_row - 1), LONGEST_WAIT_SECONDS)

    def exhausted(self, name: str, reason: str) -> str:
        """Return the message that ends a run whose process died too often."""
        return (
            f"{name} died {self.in_a_row + 1} times in a row, more than deploy.max_restarts = "
            f"{self.limit} makes up for; the last error: {reason}"
        )
