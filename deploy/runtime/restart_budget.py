"""The limit of restarts in a row of a process that dies, and the wait before each of them.

A process that fails twice in the same way before it has done any work is not started a third time.
"""

import re
from dataclasses import dataclass

FIRST_WAIT_SECONDS = 1.0
"""Wait before the first restart in a row; each further wait is twice as long."""
LONGEST_WAIT_SECONDS = 30.0
SETTLED_SECONDS = 600.0
"""A process that worked for this long before its death starts counting anew."""
PASSING = re.compile(
    r"\bthe (?:actor|worker|node) |\bkill|\bsignal|(?-i:\bSIG[A-Z]+\b)|unexpectedly|\bgone$|"
    r"preempt|\bdrain|memory|\bOOM|no space left|too many open files|temporar|unavailable|\bbusy|"
    r"\bin use\b|time[ds]?[ -]?out|deadline|within [\d.]+ ?s|connection|\bconnect\b|\breset\b|"
    r"unreachable|no route|not connected|broken pipe|stale file|input/output error|"
    r"too many requests|bad gateway|server error|failed core proc",
    re.IGNORECASE,
)
"""Parts of errors that another start may not meet."""
LASTING = re.compile(
    r"\b(?:Attribute|Import|(?:Module|Package)NotFound|Name|NotImplemented|Syntax|Type)Error:"
)
"""Types of errors that it will meet, whatever names they have in them."""
VARYING = re.compile(r"\S*/\S+|\b(?:0x)?[\da-f]*\d[\da-f]*\b", re.IGNORECASE)
"""Parts in which two errors of the same kind differ: numbers, addresses, ids, paths."""


@dataclass(slots=True)
class RestartBudget:
    """The restarts of one process; `limit` is `deploy.max_restarts`."""

    limit: int
    in_a_row: int = 0
    failure: str | None = None
    """Kind of the last failure, if that was one before any work which may come again."""
    is_final: bool = False
    """True once a failure has come again."""

    def next_wait(self, *, settled: bool, failure: str = "") -> float | None:
        """Return the seconds to wait before a restart, counted anew if `settled`; None: no more.

        `failure` is the error of a process that had done no work.
        """
        passes = not failure or (PASSING.search(failure) and not LASTING.search(failure))
        kind = None if passes else VARYING.sub("#", failure)
        self.is_final, self.failure = kind is not None and kind == self.failure, kind
        if settled:
            self.in_a_row = 0
        if self.in_a_row >= self.limit or self.is_final:
            return None
        self.in_a_row += 1
        return min(FIRST_WAIT_SECONDS * 2.0 ** (self.in_a_row - 1), LONGEST_WAIT_SECONDS)

    def exhausted(self, name: str, reason: str) -> str:
        """Return the message that ends a run whose process died too often."""
        if self.is_final:
            return f"{name} failed twice in the same way before it did any work: {reason}"
        return (
            f"{name} died {self.in_a_row + 1} times in a row, more than deploy.max_restarts = "
            f"{self.limit} makes up for; the last error: {reason}"
        )
