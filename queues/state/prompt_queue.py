"""The prompt queue: groups that wait for a lease, evaluations first, then training, oldest first.

A redelivered group goes to the front: it has waited longest. A train group whose attempt failed is
deferred first, so that others are leased until its wait is over.
"""

import heapq
from collections import deque
from collections.abc import Mapping

from queues.state.groups import EvaluationRun, Group


class PromptQueue:
    """Queued groups in the order of their leases; those of evaluations wait in these."""

    def __init__(self, evaluations: Mapping[str, EvaluationRun]) -> None:
        self._train: deque[Group] = deque()
        self._evaluations = evaluations
        self._deferred: list[tuple[float, int, Group]] = []
        """Heap of (end of the wait, number, group)."""

    def __len__(self) -> int:
        """Return the number of train groups, including deferred groups."""
        return len(self._train) + len(self._deferred)

    @property
    def available(self) -> int:
        """Number of train groups that may be leased now."""
        return len(self._train)

    def oldest_seconds(self, now: float) -> float:
        """Return the age of the oldest available train group; 0 without any."""
        return max((now - group.queued_at for group in self._train), default=0.0)

    def append(self, group: Group) -> None:
        """Add a new group at the end of its queue."""
        self._queue(group).append(group)

    def redeliver(self, group: Group) -> None:
        """Add a group that was leased before at the front of its queue."""
        self._queue(group).appendleft(group)

    def defer(self, group: Group, until: float) -> None:
        """Add a train group whose attempt failed; it waits until then, in monotonic seconds."""
        heapq.heappush(self._deferred, (until, group.number, group))

    def advance(self, now: float) -> None:
        """Move groups whose wait is over to the front of the queue, the earliest first."""
        due = []
        while self._deferred and self._deferred[0][0] <= now:
            due.append(heapq.heappop(self._deferred)[2])
        for group in reversed(due):
            self.redeliver(group)

    def pop_train(self, limit: int) -> list[Group]:
        """Remove and return up to `limit` train groups."""
        return _pop(self._train, limit)

    def pop_evaluations(self, limit: int, engine_version: int) -> list[Group]:
        """Remove and return up to `limit` evaluation groups for an engine of this version."""
        groups: list[Group] = []
        for run in self._evaluations.values():
            if run.min_version <= engine_version:
                groups += _pop(run.queued, limit - len(groups))
        return groups

    def pop_unreachable(self, last_version: int) -> list[Group]:
        """Remove and return all groups whose evaluation wants a version after the last one."""
        groups: list[Group] = []
        for run in self._evaluations.values():
            if run.min_version > last_version:
                groups += _pop(run.queued, len(run.queued))
        return groups

    def _queue(self, group: Group) -> deque[Group]:
        name = group.evaluation
        return self._train if name is None else self._evaluations[name].queued


def _pop(queue: deque[Group], limit: int) -> list[Group]:
    return [queue.popleft() for _ in range(min(limit, len(queue)))]
