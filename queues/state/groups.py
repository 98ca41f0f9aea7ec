"""The broker's memory of all groups: every group is in exactly one state, and counted.

    queued ─lease─▶ leased ─put─▶ ready ─take─▶ taken ─ack─▶ trained
       ▲               │   └─put─▶ dropped (filtered)
       └───redeliver───┴──▶ failed
    leased or ready ─take of the batch that it is due with─▶ dropped (overdue)

Evaluation groups go queued ─▶ leased ─▶ scored or failed, and are counted apart; those that want a
version which training never reached go from queued to failed. Groups in a final state are only
counted.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from queues.errors import SchemaError
from queues.records import INFRASTRUCTURE, REWARD_MODEL_LOST, Prompt, Purpose, Summary


class State(StrEnum):
    """The state of a group; the module shows the moves between states."""

    QUEUED = "queued"
    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    SCORED = "scored"


ENGINE_LOST = "engine_lost"
"""Reason why leases end whose engine is gone."""
UNCLAIMED = "unclaimed"
"""Reason why leases of a broker end that was made again: their holders do not know of them."""
EXCUSED = frozenset({ENGINE_LOST, INFRASTRUCTURE, REWARD_MODEL_LOST, UNCLAIMED})
"""Reasons of failed attempts that do not count against `max_attempts`."""
UNREACHABLE = "version_not_reached"
"""Reason of failing: the evaluation wants a version after the last one."""
FINAL = frozenset({State.TRAINED, State.DROPPED, State.FAILED, State.SCORED})
FILTERED = "filtered"
"""Reason of dropping: the accepted result holds no signal."""
OVERDUE = "overdue"
"""Reason of dropping: the last batch that might train the group was taken without it."""


class Acceptance(NamedTuple):
    """The effect of an accepted result; decided by the state, recorded by the ledger."""

    state: State
    let_through: bool = False
    """The group would have been filtered, but too many were."""
    retires: str | None = None
    """Name of the prompt, if it is not issued again."""
    passes: int | None = None
    """Rollouts that passed; None for an evaluation."""


StateCounts = Mapping[tuple[Purpose, State, str], int]
"""Number of groups by purpose, state and reason; the reason is "" if there is none."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """One issue of a prompt that is not in a final state."""

    number: int
    group_id: str
    prompt: Prompt
    evaluation: str | None = None
    """Name of its evaluation; None for training."""
    state: State = State.QUEUED
    attempt: int = 0
    """Number of the latest lease; 0 before the first."""
    failures: int = 0
    """Failed attempts, less those that `EXCUSED` explains; a recovered broker begins at 0."""
    not_before: float = 0.0
    """Monotonic seconds: no lease until then, after a failed attempt."""
    engine_id: str | None = None
    start_version: int | None = None
    due: int | None = None
    """The deadline while leased or ready, the version of its batch while taken; else None."""
    overdue: bool = False
    """True once the batch of its deadline was taken without it."""
    expires: float = 0.0
    """Monotonic seconds; while leased."""
    queued_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds of its issue, or of the broker's recovery."""
    ready_at: float = 0.0
    """Monotonic seconds."""
    ready_version: int = 0
    """The learner's version then, or when the broker was recovered."""
    saved: int | None = None
    """Oldest version of the tokens that were saved without a result; None without any."""
    noted: int | None = None
    """Oldest version of the tokens in the notes about its rollouts; None without any."""

    @property
    def begun(self) -> int | None:
        """Oldest version of all that was saved or noted, with which the next lease goes on."""
        return oldest_of(self.saved, self.noted)

    @property
    def purpose(self) -> Purpose:
        """Return the purpose that the group is generated for."""
        return Purpose.TRAIN if self.evaluation is None else Purpose.EVALUATE

    def check(self, result: Summary, group_size: int) -> None:
        """Raise SchemaError if a result has another size, prompt or start than what was leased."""
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

    def is_from(self, engine_id: str, attempt: int) -> bool:
        """Return True if this holder has the lease, or had it and delivered the result."""
        latest = (self.engine_id, self.attempt) == (engine_id, attempt)
        return latest and self.state is not State.QUEUED


@dataclass(slots=True, kw_only=True)
class EvaluationRun:
    """A held-out evaluation; made when it is queued, and again from the ledger."""

    name: str
    count: int
    """Samples."""
    temperature: float
    min_version: int
    ended: int = 0
    """Samples that are scored or failed."""
    queued: deque[Group] = field(default_factory=deque)
    """Samples that wait for a lease."""

    @property
    def finished(self) -> bool:
        """True once every sample is scored or failed."""
        return self.ended == self.count


class Groups:
    """All groups: groups in flight by id, finished groups as counts."""

    def __init__(self, finished: StateCounts | None = None) -> None:
        self.in_flight: dict[str, Group] = {}
        self.counts: Counter[tuple[Purpose, State, str]] = Counter(finished or {})
        self.due: Counter[int] = Counter()
        """Number of live groups by the version at which they are due, without overdue groups."""
        self.leased_due: Counter[int] = Counter()
        """Number of leased train groups by deadline, including overdue groups."""
        self.overdue = 0
        """Number of leased or ready groups that are overdue."""
        self.inherited: dict[str, list[tuple[str, int]]] = {}
        """Group and attempt of the leases of the broker before this one, by engine, until its first
        heartbeat."""

    def add(self, group: Group) -> None:
        """Add a group in its present state."""
        self.in_flight[group.group_id] = group
        self._count(group, +1)

    def move(self, group: Group, state: State, *, due: int | None = None, reason: str = "") -> None:
        """Change a group's state; `due` is None unless the group is live afterwards."""
        self._count(group, -1)
        group.state, group.due = state, due
        self._count(group, +1, reason)
        if state in FINAL:
            del self.in_flight[group.group_id]

    def pass_over(self, group: Group) -> None:
        """Mark a leased or ready group as overdue."""
        self._count(group, -1)
        group.overdue = True
        self._count(group, +1)

    def missed(self, version: int) -> list[Group]:
        """Return leased and ready groups due by `version` and not yet overdue, by issue."""
        return [
            group
            for group in self.in_flight.values()
            if group.state in (State.LEASED, State.READY)
            and group.due is not None
            and group.due <= version
            and not group.overdue
        ]

    def leased(self) -> list[Group]:
        """Return all leased groups, evaluations included."""
        return [group for group in self.in_flight.values() if group.state is State.LEASED]

    def leased_to(self, engine_id: str, group_id: str, attempt: int) -> Group | None:
        """Return the group if this holder has its lease, else None."""
        group = self.in_flight.get(group_id)
        is_held = group and group.state is State.LEASED and group.is_from(engine_id, attempt)
        return group if is_held else None

    def claim(self, engine_id: str, held: Collection[tuple[str, int]]) -> list[Group]:
        """Return the inherited leases of an engine that it does not hold: it had no answer.

        `held` are all that it holds, as (group id, attempt). Later calls return nothing.
        """
        unclaimed = [x for x in self.inherited.pop(engine_id, []) if x not in held]
        groups = [self.leased_to(engine_id, *lease) for lease in unclaimed]
        return [group for group in groups if group is not None]

    @property
    def any_leased(self) -> bool:
        """True if any group is leased, of an evaluation too."""
        return any(self.counts[purpose, State.LEASED, ""] for purpose in Purpose)

    def train(self, state: State) -> int:
        """Return the number of train groups in a state, for any reason."""
        return sum(
            count
            for (purpose, group_state, _), count in self.counts.items()
            if purpose is Purpose.TRAIN and group_state is state
        )

    def dropped(self, reason: str) -> int:
        """Return the number of groups that were dropped for this reason."""
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


def oldest_of(*versions: int | None) -> int | None:
    """Return the oldest of the versions that there are; None without any."""
    return min((version for version in versions if version is not None), default=None)


def _add(counter: Counter[Any], key: Any, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]
