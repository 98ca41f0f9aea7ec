"""Every group in exactly one state, counted: the broker's memory of who holds what.

    queued ─lease─▶ leased ─put─▶ ready ─take─▶ taken ─ack─▶ trained
       ▲               │   └─put─▶ dropped (filtered)
       └───redeliver───┴──▶ failed

Evaluation groups go queued ─▶ leased ─▶ scored or failed, and are counted apart; those that want a
version which training never reached go from queued to failed. Groups in a final state are only
counted. Which move is allowed is the caller's decision (`queues.broker`); what is
durable is the ledger's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from queues.records import Prompt, Purpose


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
ACCEPTED = frozenset({State.READY, State.TAKEN, State.TRAINED, State.SCORED})
"""The states of groups whose one accepted result counts."""
FILTERED = "filtered"
"""Why groups are dropped whose accepted result holds no signal."""


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
    engine_id: str | None = None
    start_version: int | None = None
    due: int | None = None
    """While live: the deadline, and once taken the version of its batch (`queues.admission`)."""
    expires: float = 0.0
    """Monotonic seconds; while leased."""
    ready_at: float = 0.0
    """Monotonic seconds; from ready on."""
    saved: int | None = None
    """The oldest version of its tokens that were saved without a result; None without any."""

    @property
    def purpose(self) -> Purpose:
        """What it is generated for."""
        return Purpose.TRAIN if self.evaluation is None else Purpose.EVALUATE

    def is_leased_to(self, engine_id: str, attempt: int) -> bool:
        """Whether this holder has the lease."""
        return self.state is State.LEASED and self.is_from(engine_id, attempt)

    def is_from(self, engine_id: str, attempt: int) -> bool:
        """Whether this holder has the lease, or had it and delivered the result."""
        latest = (self.engine_id, self.attempt) == (engine_id, attempt)
        return latest and self.state is not State.QUEUED


class Groups:
    """All groups: those in flight by id, the finished ones as counts."""

    def __init__(self, groups: Iterable[Group] = (), finished: StateCounts | None = None) -> None:
        self.in_flight: dict[str, Group] = {}
        self.counts: Counter[tuple[Purpose, State, str]] = Counter(finished or {})
        self.due: Counter[int] = Counter()
        """Live groups by the date that they are due."""
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

    @property
    def accepted(self) -> int:
        """Number of results accepted so far, evaluations included; it never falls."""
        return sum(
            count
            for (_, state, reason), count in self.counts.items()
            if state in ACCEPTED or reason == FILTERED
        )

    @property
    def filtered(self) -> int:
        """Number of groups that were dropped because their result holds no signal."""
        return self.counts[Purpose.TRAIN, State.DROPPED, FILTERED]

    @property
    def live(self) -> int:
        """Number of train groups that are leased, ready or taken."""
        return self.due.total()

    def _count(self, group: Group, change: int, reason: str = "") -> None:
        _add(self.counts, (group.purpose, group.state, reason), change)
        if group.due is not None:
            _add(self.due, group.due, change)


def _add(counter: Counter[Any], key: Any, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]
