"""Every group in exactly one state, counted: the broker's memory of who holds what.

    queued ─lease─▶ leased ─put─▶ ready ─take─▶ taken ─ack─▶ trained
       ▲               │   └─put─▶ dropped (filtered)
       └───redeliver───┴──▶ failed
    leased or ready ─take of the batch that it is due with─▶ dropped (overdue)

Evaluation groups go queued ─▶ leased ─▶ scored or failed, and are counted apart; those that want a
version which training never reached go from queued to failed. Groups in a final state are only
counted. Which move is allowed is the caller's decision (`queues.broker.broker`); what is
durable is the ledger's.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from queues.errors import SchemaError
from queues.records import Prompt, Purpose, Summary


class State(StrEnum):
    """Where a group is."""

    QUEUED = "queued"
    """Waits for its first lease or for redelivery."""
    LEASED = "leased"
    READY = "ready"
    """Its result is accepted and waits for the learner."""
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    SCORED = "scored"
    """An evaluation's only good end."""


FINAL = frozenset({State.TRAINED, State.DROPPED, State.FAILED, State.SCORED})
FILTERED = "filtered"
"""Why groups are dropped whose accepted result holds no signal."""
OVERDUE = "overdue"
"""Why groups are dropped that were not ready for the last batch that might train them."""


class Acceptance(NamedTuple):
    """What an accepted result does; decided by the book, recorded by the ledger."""

    state: State
    """Where the group is now: ready, dropped or scored."""
    reason: str = ""
    """Of dropping."""
    let_through: bool = False
    """It would have been filtered, but too many were."""
    retires: str | None = None
    """Name of the prompt that is not issued again."""


StateCounts = Mapping[tuple[Purpose, State, str], int]
"""Number of groups by purpose, state and reason; the reason is "" where there is none."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """One issue of a prompt that is not in a final state."""

    number: int
    """Order of issue."""
    group_id: str
    prompt: Prompt
    evaluation: str | None = None
    """Name of the evaluation that it belongs to; None for training."""
    state: State = State.QUEUED
    attempt: int = 0
    """Of the latest lease; 0 before the first."""
    failures: int = 0
    """Attempts that ended badly by their own doing; a broker that recovers begins anew."""
    not_before: float = 0.0
    """Monotonic seconds: no lease until then, after a failed attempt."""
    engine_id: str | None = None
    start_version: int | None = None
    due: int | None = None
    """While live: the deadline, and once taken the version of its batch (`admission`)."""
    overdue: bool = False
    """The batch that it was due with was taken without it."""
    expires: float = 0.0
    """Monotonic seconds; while leased."""
    queued_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds, when it was issued, or found again by a broker that recovers."""
    ready_at: float = 0.0
    """Monotonic seconds; from ready on."""
    saved: int | None = None
    """The oldest version of its tokens that were saved without a result; None without any."""

    @property
    def purpose(self) -> Purpose:
        """What it is generated for."""
        return Purpose.TRAIN if self.evaluation is None else Purpose.EVALUATE

    def check(self, result: Summary, group_size: int) -> None:
        """Refuse a result that is not what was leased.

        Args:
            result: Of this group.
            group_size: Rollouts of a train group.

        Raises:
            SchemaError: Says what is not.
        """
        where = f"of group {self.group_id}"
        size = group_size if self.evaluation is None else 1
        if result.rollouts != size:
            raise SchemaError(f"rollouts: {result.rollouts} {where}, must be {size}")
        if result.prompt_id != self.prompt.prompt_id:
            raise SchemaError(
                f"prompt_id: {result.prompt_id!r} {where}, must be {self.prompt.prompt_id!r}"
            )
        start, oldest = self.start_version, result.oldest_version
        if start is not None and oldest is not None and oldest < start:
            raise SchemaError(
                f"versions: a token {where} is of version {oldest}, but it was leased at version"
                f" {start}, so its deadline would not hold"
            )

    def is_leased_to(self, engine_id: str, attempt: int) -> bool:
        """Whether this holder has the lease."""
        return self.state is State.LEASED and self.is_from(engine_id, attempt)

    def is_from(self, engine_id: str, attempt: int) -> bool:
        """Whether this holder has the lease, or had it and delivered the result."""
        latest = (self.engine_id, self.attempt) == (engine_id, attempt)
        return latest and self.state is not State.QUEUED


class Reissue(NamedTuple):
    """A group that was dropped, and the one that its prompt was issued anew as."""

    dropped: Group
    anew: Group


class Groups:
    """All groups: those in flight by id, the finished ones as counts."""

    def __init__(self, groups: Iterable[Group] = (), finished: StateCounts | None = None) -> None:
        self.in_flight: dict[str, Group] = {}
        self.counts: Counter[tuple[Purpose, State, str]] = Counter(finished or {})
        self.due: Counter[int] = Counter()
        """Live groups by the date that they are due, less those that are overdue."""
        self.leased_due: Counter[int] = Counter()
        """Leased train groups by the date that they are due, also those that are overdue."""
        self.overdue = 0
        """Live groups that are overdue: leased or ready."""
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        """Take in a group in the state that it is in."""
        self.in_flight[group.group_id] = group
        self._count(group, +1)

    def move(self, group: Group, state: State, *, due: int | None = None, reason: str = "") -> None:
        """Change a group's state; `due` is None unless it is live afterwards."""
        self._count(group, -1)
        group.state, group.due = state, due
        self._count(group, +1, reason)
        if state in FINAL:
            del self.in_flight[group.group_id]

    def pass_over(self, group: Group) -> None:
        """A leased or ready group is overdue from now on."""
        self._count(group, -1)
        group.overdue = True
        self._count(group, +1)

    def missed(self, version: int) -> list[Group]:
        """Leased and ready groups that were due by `version` and are not overdue yet, by issue."""
        return [
            group
            for group in self.in_flight.values()
            if group.state in (State.LEASED, State.READY)
            and group.due is not None
            and group.due <= version
            and not group.overdue
        ]

    def leased(self) -> list[Group]:
        """All leased groups, evaluations included."""
        return [group for group in self.in_flight.values() if group.state is State.LEASED]

    def train(self, state: State) -> int:
        """Number of train groups in a state, whatever the reason."""
        return sum(
            count
            for (purpose, found, _), count in self.counts.items()
            if purpose is Purpose.TRAIN and found is state
        )

    def dropped(self, reason: str) -> int:
        """Number of groups that were dropped for this reason."""
        return self.counts[Purpose.TRAIN, State.DROPPED, reason]

    @property
    def live(self) -> int:
        """Number of train groups that are leased, ready or taken."""
        return self.due.total() + self.overdue

    def _count(self, group: Group, change: int, reason: str = "") -> None:
        _add(self.counts, (group.purpose, group.state, reason), change)
        if group.due is None:
            return
        if group.state is State.LEASED:
            _add(self.leased_due, group.due, change)
        if group.overdue and group.state is not State.TAKEN:
            self.overdue += change
        else:
            _add(self.due, group.due, change)


def _add(counter: Counter[Any], key: Any, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]
