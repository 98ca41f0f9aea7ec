"""The results queue: ready groups, earliest deadline first, then in the order of their issue.

A batch therefore does not depend on which worker was faster, and a recovered broker has the order
that the last one had. `queues.policy.admission` decides when the learner may take groups.
"""

from bisect import insort

from queues.state.groups import Group


class ResultsQueue:
    """Accepted groups that wait for the learner."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        """Insert a group that became ready."""
        insort(self._groups, group, key=lambda group: (_deadline(group), group.number))

    def remove(self, group: Group) -> None:
        """Remove a ready group that is dropped."""
        self._groups.remove(group)

    def deadlines(self) -> list[int]:
        """Return the deadlines of all ready groups, earliest first."""
        return [_deadline(group) for group in self._groups]

    def pop(self, count: int) -> list[Group]:
        """Remove and return the `count` groups with the earliest deadlines."""
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def oldest_seconds(self, now: float) -> float:
        """Return the longest time that a group has been ready; 0 without any."""
        return max((now - group.ready_at for group in self._groups), default=0.0)


def _deadline(group: Group) -> int:
    assert group.due is not None, "a ready group has a deadline"
    return group.due
