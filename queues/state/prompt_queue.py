"""The line of groups that wait for a lease: evaluations first, then training, oldest issue first.

A redelivered group goes to the front: it has waited longest. A train group whose attempt failed is
set back first, out of the line, so that others are leased until its wait is over. Who may lease how
many is decided by `queues.policy.admission`.
"""

import heapq
from collections import deque

from queues.state.groups import Group


class PromptQueue:
    """Queued groups in the order of their leases."""

    def __init__(self) -> None:
        self._train: deque[Group] = deque()
        self._evaluations: dict[str, tuple[int, deque[Group]]] = {}
        self._set_back: list[tuple[float, int, Group]] = []
        """A heap: when its wait is over, its number, the group."""

    def __len__(self) -> int:
        """Train groups that wait, those that are set back included."""
        return len(self._train) + len(self._set_back)

    @property
    def in_line(self) -> int:
        """Train groups that may be leased now."""
        return len(self._train)

    def oldest_since(self) -> float | None:
        """When the train group in line that waits longest was issued, in monotonic seconds."""
        return min((group.queued_at for group in self._train), default=None)

    def open_evaluation(self, name: str, min_version: int) -> None:
        """Groups of this evaluation go to engines that serve `min_version` or later."""
        self._evaluations[name] = (min_version, deque())

    def close_evaluation(self, name: str) -> None:
        """The evaluation is finished; none of its groups waits."""
        del self._evaluations[name]

    def append(self, group: Group) -> None:
        """A new group joins the end of its line."""
        self._line(group).append(group)

    def redeliver(self, group: Group) -> None:
        """A group that was leased before goes to the front of its line."""
        self._line(group).appendleft(group)

    def set_back(self, group: Group, until: float) -> None:
        """A train group whose attempt failed is out of line until then, in monotonic seconds."""
        heapq.heappush(self._set_back, (until, group.number, group))

    def advance(self, now: float) -> None:
        """Groups whose wait is over go to the front of the line, the first of them foremost."""
        over = []
        while self._set_back and self._set_back[0][0] <= now:
            over.append(heapq.heappop(self._set_back)[2])
        for group in reversed(over):
            self.redeliver(group)

    def pop_train(self, limit: int) -> list[Group]:
        """Up to `limit` train groups leave the line."""
        return _pop(self._train, limit)

    def pop_evaluations(self, limit: int, engine_version: int) -> list[Group]:
        """Up to `limit` evaluation groups that an engine of this version may score."""
        groups: list[Group] = []
        for min_version, line in self._evaluations.values():
            if min_version <= engine_version:
                groups += _pop(line, limit - len(groups))
        return groups

    def pop_unreachable(self, last_version: int) -> list[Group]:
        """All groups leave whose evaluation wants a version after the last one."""
        groups: list[Group] = []
        for min_version, line in self._evaluations.values():
            if min_version > last_version:
                groups += _pop(line, len(line))
        return groups

    def _line(self, group: Group) -> deque[Group]:
        return self._train if group.evaluation is None else self._evaluations[group.evaluation][1]


def _pop(line: deque[Group], limit: int) -> list[Group]:
    return [line.popleft() for _ in range(min(limit, len(line)))]
