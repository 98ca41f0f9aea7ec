"""Ready groups, earliest deadline first, in the order of their issue within a deadline.

So a batch does not depend on who was faster, and a broker that recovers has the order that the last
one had. Whether the learner may take them is decided by `queues.policy.admission`.
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
        """A group became ready."""
        insort(self._groups, group, key=lambda group: (_deadline(group), group.number))

    def remove(self, group: Group) -> None:
        """A ready group is not to be taken any more."""
        self._groups.remove(group)

    def deadlines(self) -> list[int]:
        """Of all ready groups, earliest first."""
        return [_deadline(group) for group in self._groups]

    def pop(self, count: int) -> list[Group]:
        """The `count` groups with the earliest deadlines leave the queue."""
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def oldest_since(self) -> float | None:
        """When the group that waits longest became ready, in monotonic seconds; None if empty."""
        return min((group.ready_at for group in self._groups), default=None)


def _deadline(group: Group) -> int:
    assert group.due is not None, "a ready group has a deadline"
    return group.due
