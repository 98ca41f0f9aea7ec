"""Who waits on whom for what, and since when: pure, from what a run shows of itself.

    signs (one look at a run) ─▶ waits ─▶ Waits: how long each lasts without anything changing

Every wait has an owner, a thing that is waited for, and a token that changes when it moves; a wait
whose token stays for longer than the deadline is overdue. Leaves out how signs are gathered and
what follows (`deploy.observability.watchdog`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSigns:
    """One rollout actor that works."""

    engine_id: str
    answers: bool
    """Whether it answered when it was asked last."""
    running: int = 0
    """Rollouts that it generates or has scored."""
    finished: int = 0
    """Rollouts that came to their end."""
    pinned_seconds: float = 0.0
    """How long it may keep a version to evaluate it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSigns:
    """What a broker says."""

    version: int
    steps: int
    queued: int
    leased: int
    ready: int
    taken: int
    live: int
    window: int
    waits_for: Mapping[str, str | None]
    """Leased groups that the learner waits for, and who holds each."""
    engines: Mapping[str, int]
    """The version that each engine serves."""
    accepted: int = 0
    """Results, evaluations included."""
    scores_first: bool = False
    """The initial policy is not scored yet, and no prompt comes before it is."""
    paused: bool
    """It waits for room on its disk, and says so itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One look at a run."""

    broker: BrokerSigns | None
    """None: it does not answer."""
    actors: Mapping[str, ActorSigns]
    """By name, as "actor-0"; those that work."""
    silent: Collection[str] = ()
    """Of the others, as "learner-1", those that do not answer."""
    disk: bool
    """Whether the last small file became durable."""
    groups_per_batch: int


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, as a sentence: `who` waits on `on` for `what`."""

    who: str
    on: str
    """A process, as "actor-0", "broker" or "learner", or a thing."""
    what: str
    allowed: float = 0.0
    """Seconds that it may last before its deadline begins."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A wait that lasts."""

    wait: Wait
    seconds: float
    """Since it began, or since anything about it changed."""


DISK = "the disk of the run's folder"


def waits(signs: Health) -> Iterator[tuple[Wait, Any]]:
    """Everything that somebody waits for, and its token."""
    if not signs.disk:
        yield Wait("driver", DISK, "a small file to become durable"), None
    for name, actor in signs.actors.items():
        if not actor.answers:
            yield Wait("driver", name, "an answer"), None
        if actor.running:
            serves = signs.broker.engines.get(actor.engine_id) if signs.broker else None
            token = (actor.finished, serves)
            yield Wait("results queue", name, f"one of {actor.running} rollouts to end"), token
    for name in signs.silent:
        yield Wait("driver", name, "an answer"), None
    if signs.broker is None:
        yield Wait("driver", "broker", "an answer"), None
    elif not signs.broker.paused and signs.broker.version < signs.broker.steps:
        yield from _around_broker(signs, signs.broker)


def _around_broker(signs: Health, broker: BrokerSigns) -> Iterator[tuple[Wait, Any]]:
    version = broker.version
    names = {actor.engine_id: name for name, actor in signs.actors.items()}
    if broker.taken:
        yield Wait("broker", "learner", f"batch {version} to be trained"), version
    elif broker.ready >= signs.groups_per_batch and not broker.waits_for:
        yield Wait("results queue", "learner", f"batch {version} to be taken"), version
    held: dict[str, list[str]] = {}
    for group, engine in broker.waits_for.items():
        held.setdefault(names.get(engine or "", engine or "nobody"), []).append(group)
    for holder, groups in held.items():
        what = f"{len(groups)} due group(s) of batch {version}"
        yield Wait("learner", holder, what), (version, len(groups))
    for engine, serves in broker.engines.items():
        if serves < version and engine in names:
            name = names[engine]
            pinned = signs.actors[name].pinned_seconds
            yield Wait(name, "weight update", f"a version above {serves}", pinned), serves
    if not signs.actors:
        return  # they start: nobody waits for prompts yet
    if broker.scores_first:
        yield Wait("feeder", "actors", "scores of the initial policy"), broker.accepted
    elif not (broker.queued or broker.leased or broker.taken) and broker.live < broker.window:
        yield Wait("actors", "feeder", "prompts"), (version, broker.ready)


class Waits:
    """How long waits last.

    Args:
        deadline: Seconds after which one is overdue.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._since: dict[tuple[str, str], tuple[Any, float]] = {}

    def overdue(self, signs: Health, now: float) -> Sequence[Overdue]:
        """The waits that have lasted too long by `now` (monotonic seconds), longest first.

        To be called at every look: a wait that is over once begins anew.
        """
        since: dict[tuple[str, str], tuple[Any, float]] = {}
        late = []
        for wait, token in waits(signs):
            key = (wait.who, wait.on)
            known, began = self._since.get(key, (token, now))
            if known != token:
                began = now
            since[key] = (token, began)
            if now - began > self._deadline + wait.allowed:
                late.append(Overdue(wait, now - began))
        self._since = since
        return sorted(late, key=lambda each: -each.seconds)
