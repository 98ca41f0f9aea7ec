"""Waits between the processes of a run: who waits on whom, for what, and for how long.

Every wait has a waiter, a process or thing waited for, and a progress marker; a wait whose marker
stays the same for longer than the deadline is overdue.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.config.evaluation_schedule import scores_first
from headway.roles import ProcessName, Role
from queues.broker.status import BrokerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorHealth:
    """State of a rollout actor that has started."""

    engine_id: str
    running: int = 0
    """Rollouts that it generates or has scored."""
    finished: int = 0
    pinned_seconds: float = 0.0
    """Seconds for which it may keep a version in order to evaluate it."""
    outages: Sequence[tuple[str, str, float]] = ()
    """Services that its rollouts wait for: see `Outages.reports`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of a run at one moment."""

    broker: BrokerStatus | None
    """None: it does not answer."""
    paused: bool
    """The broker or the learner waits for space on a disk, or an actor for a service."""
    learner_starts: bool = False
    """The ranks of the learner load, which has a deadline of its own."""
    reward_models_start: bool = False
    """The process of the reward models is being made again, with a deadline of its own."""
    learner_writes: bool = False
    """A checkpoint is being written, and may still take time."""
    learner_saved: bool = False
    """The learner has trained and saved its last version."""
    step_seconds: float = 0.0
    """The longest step of the learner so far."""
    actors: Mapping[ProcessName, ActorHealth]
    """Actors that have started."""
    actors_lacking: int = 0
    """Actors that wait for resources of the cluster, if no other works or loads; else 0."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """Processes but the broker, as "learner-1", that do not answer, and for how many seconds."""
    disk: bool
    """True if the last small file became durable."""
    groups_per_batch: int
    checkpoint_every: int = 1
    """Batches between checkpoints."""

    @property
    def learner_busy(self) -> bool:
        """True while the learner does work that has deadlines of its own.

        Training goes on while a checkpoint is written, until the next one is due or the run ends.
        """
        if self.learner_starts or self.broker is None or not self.learner_writes:
            return self.learner_starts
        (_, asked), version = self.broker.learner, self.broker.version
        return version == self.broker.steps or (
            asked < version and (asked + 1) % self.checkpoint_every == 0
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, as a sentence: `who` waits on `on` for `what`."""

    who: str
    on: str
    """A process, as "actor-0", "broker" or "learner", or a thing."""
    what: str
    allowed: float = 0.0
    """Seconds that it may last before its deadline begins."""
    seconds: float = 0.0
    """Time since the wait began, or since its progress marker changed."""


STEP_FACTOR = 3.0
"""Time that a step of the learner may take beyond its deadline, for each second of the longest."""
DISK = "the disk of the run's folder"


def waits(health: Health) -> Iterator[tuple[Wait, Any]]:
    """Yield every wait with its progress."""
    broker = health.broker
    if not health.disk:
        yield Wait(Role.DRIVER, DISK, "a small file to become durable"), None
    for name, actor in health.actors.items():
        if actor.running and not (actor.outages or health.reward_models_start):
            progress = (actor.finished, broker.engines.get(actor.engine_id) if broker else None)
            yield Wait("results queue", name, f"one of {actor.running} rollouts to end"), progress
    for process, seconds in health.silent.items():
        yield Wait(Role.DRIVER, process, "an answer", seconds=seconds), None
    if broker is None:
        yield Wait(Role.DRIVER, Role.BROKER, "an answer"), None
    elif not health.paused and broker.version < broker.steps:
        yield from _around_broker(health, broker)
    elif not (health.paused or health.learner_saved or health.learner_busy):
        allowed = STEP_FACTOR * health.step_seconds
        yield Wait(Role.DRIVER, Role.LEARNER, "its last checkpoint", allowed), broker.learner


def _on_learner(health: Health, broker: BrokerStatus) -> Iterator[tuple[Wait, Any]]:
    if health.learner_busy:
        return
    version, depth = broker.version, broker.depth
    who, what = Role.DRIVER.value, "asked for"
    if depth["taken"]:
        who, what = Role.BROKER.value, "trained"
    elif depth["ready"] >= health.groups_per_batch and not broker.waits_for:
        who, what = "results queue", "taken"
    elif broker.learner[1] == version:
        return
    allowed = STEP_FACTOR * health.step_seconds
    wait = Wait(who, Role.LEARNER, f"batch {version} to be {what}", allowed)
    yield wait, (version, broker.learner)


def _around_broker(health: Health, broker: BrokerStatus) -> Iterator[tuple[Wait, Any]]:
    yield from _on_learner(health, broker)
    version, depth = broker.version, broker.depth
    names = {actor.engine_id: name for name, actor in health.actors.items()}
    groups_by_holder: dict[str, list[str]] = {}
    for group, engine in broker.waits_for.items():
        holder = names.get(engine or "", engine or "nobody")
        groups_by_holder.setdefault(holder, []).append(group)
    for holder, groups in groups_by_holder.items():
        what = f"{len(groups)} due group(s) of batch {version}"
        yield Wait(Role.LEARNER, holder, what), (version, len(groups))
    for engine, served in broker.engines.items():
        if served < version and engine in names:
            name = names[engine]
            pinned = health.actors[name].pinned_seconds
            yield Wait(name, "weight update", f"a version above {served}", pinned), served
    if not health.actors:  # they start: nobody waits for prompts yet
        if health.actors_lacking:
            what = f"resources for {health.actors_lacking} actor(s)"
            yield Wait("prompt queue", "the cluster", what), None
        return
    in_work = depth["queued"] or depth["leased"] or depth["taken"]
    if scores_first(broker.evaluations):
        yield Wait("feeder", "actors", "scores of the initial policy"), broker.accepted
    elif not in_work and broker.live < broker.window:
        yield Wait("actors", "feeder", "prompts"), (version, depth["ready"])


class Waits:
    """Durations of waits over successive looks at a run; overdue after `deadline` seconds."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._since: dict[tuple[str, str], tuple[Any, float]] = {}

    def overdue(self, health: Health, now: float) -> Sequence[Wait]:
        """Return the waits that are overdue at `now` (monotonic seconds), longest first.

        To be called at every look: a wait that is missing once begins anew.
        """
        since: dict[tuple[str, str], tuple[Any, float]] = {}
        late = []
        for wait, progress in waits(health):
            key = (wait.who, wait.on)
            known, began = self._since.get(key, (progress, now - wait.seconds))
            began = began if known == progress else now
            since[key] = (progress, began)
            if now - began > self._deadline + wait.allowed:
                late.append(replace(wait, seconds=now - began))
        self._since = since
        return sorted(late, key=lambda wait: -wait.seconds)


class Movement:
    """Measures how long no batch was trained, no result accepted and no engine updated."""

    def __init__(self) -> None:
        self._newest: Any = None
        self._moved_at: float | None = None

    def idle_seconds(self, health: Health, now: float) -> float:
        """Return the seconds without movement by `now` (monotonic seconds).

        The time does not count while the learner, the reward models or all actors start, the
        learner waits for the writing of a checkpoint, or the run for a disk or a service. A broker
        that does not answer does not move.
        """
        broker, newest = health.broker, self._newest
        if broker is not None:
            newest = (broker.version, broker.learner, broker.accepted, dict(broker.engines))
        starts = health.learner_busy or health.reward_models_start or not health.actors
        excused = starts or (broker is not None and health.paused)
        if self._moved_at is None or excused or newest != self._newest:
            self._newest, self._moved_at = newest, now
        return now - self._moved_at
