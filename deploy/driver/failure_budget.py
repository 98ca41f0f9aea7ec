"""The limit on groups that fail for good: a number among the newest groups that ended."""

from collections import deque
from collections.abc import Mapping

from queues.state.groups import State

ENDED = (State.READY, State.TAKEN, State.TRAINED, State.DROPPED, State.FAILED)
"""States of train groups that have a result, or will have none."""


class FailureBudget:
    """Counts the failed ones among the last `window` groups that ended in this session."""

    def __init__(self, allowed: int, window: int) -> None:
        self._allowed, self._window = allowed, window
        self._counts: deque[tuple[int, int]] = deque()
        """Groups that had ended and failed, at earlier calls; the oldest is about `window` ago."""

    def exceeded(self, depth: Mapping[str, int]) -> int | None:
        """Return the failed groups of the window if they are too many, else None.

        `depth` counts the train groups of the run by state.
        """
        ended, failed = sum(depth.get(state, 0) for state in ENDED), depth[State.FAILED]
        self._counts.append((ended, failed))
        while len(self._counts) > 1 and self._counts[1][0] <= ended - self._window:
            self._counts.popleft()
        recent = failed - self._counts[0][1]
        return recent if recent > self._allowed else None
