"""Model of `headway top`: the figures of a run, from two moments of its metrics.

Pure. Rates are taken between the moments; a process restarted in between counts from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.observability.prometheus_text import Moment

PHASES = ("wait", "step", "publish")
"""Phases of the learner."""
LAST_BATCH = "headway_last_batch_timestamp_seconds"
LEARNING = {
    "reward": "headway_reward_mean",
    "ESS": "headway_ess",
    "length": "headway_response_length_mean",
    "entropy": "headway_entropy_mean",
    "grad norm": "headway_grad_norm",
}
"""Figures of the newest batch, by label."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in the run."""

    at: float
    """Epoch seconds."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorView:
    """Figures of one rollout actor."""

    name: str
    state: str
    version: int | None
    """The version that its engine serves."""
    running: int
    """Rollouts being generated."""
    tokens_per_second: float | None
    idle: float | None
    """Share of the time between the moments without a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates per second between two moments; None where there is only one, or no process answers."""

    issued: float | None
    leased: float | None
    taken: float | None
    """Groups, as the two above."""
    accepted: float | None
    """Results, evaluations included."""
    trained: float | None
    """Batches."""
    tokens_generated: float | None
    tokens_trained: float | None
    updates: float | None
    """Weight updates of all engines."""
    update_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Figures of one frame."""

    run: str
    at: float
    version: int | None
    steps: int | None
    max_staleness: int | None
    groups: dict[str, int]
    """By state."""
    live: int | None
    window: int | None
    oldest_ready_seconds: float | None
    oldest_queued_seconds: float | None
    waits_for: int | None
    """Groups that the learner waits for."""
    rates: Rates
    actors: Sequence[ActorView]
    lags: dict[str, float]
    """Share of the tokens trained between the moments, or ever, by lag."""
    phases: dict[str, float]
    """Share of the learner's time between the moments."""
    update_seconds: float | None
    """From publication to generating with the new weights, mean between the moments, or ever."""
    learning: dict[str, float]
    """Figures of the newest batch."""
    seconds_since_batch: float | None
    troubles: Sequence[str]
    """Problems that need attention."""
    events: Sequence[Event]


def view(now: Moment, before: Moment | None, events: Sequence[Event]) -> View:
    """Compute one frame from the newest moment, an earlier one if any, and the newest events."""
    interval, ended = Interval(now, before), now.value(LAST_BATCH)
    learning = {label: now.value(name) for label, name in LEARNING.items()}
    learning["held-out"] = now.value("headway_heldout_score", kind="greedy")
    serving_seconds = interval.gained("headway_weight_update_seconds_total", phase="serve")
    updates = interval.gained("headway_weight_updates_total")
    return View(
        run=now.run,
        at=now.at,
        version=_whole(now.value("headway_version")),
        steps=_whole(now.value("headway_steps")),
        max_staleness=_whole(now.value("headway_max_staleness")),
        groups={state: int(count) for state, count in now.by("headway_groups", "state").items()},
        live=_whole(now.value("headway_live_groups")),
        window=_whole(now.value("headway_window_groups")),
        oldest_ready_seconds=now.value("headway_ready_oldest_seconds"),
        oldest_queued_seconds=now.value("headway_queued_oldest_seconds"),
        waits_for=_whole(now.value("headway_learner_waits_for_groups")),
        rates=_rates(interval),
        actors=[_actor(name, interval) for name in now.processes if name.startswith("actor-")],
        lags=_lags(interval),
        phases=_phases(interval),
        update_seconds=serving_seconds / updates if updates else None,
        learning={label: value for label, value in learning.items() if value is not None},
        seconds_since_batch=None if ended is None else max(0.0, now.at - ended),
        troubles=_troubles(now),
        events=events,
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two moments of a run, or only the newest moment."""

    now: Moment
    before: Moment | None

    def per_second(self, value: float | None, earlier: float | None) -> float | None:
        """Return the rate at which a counter rose; None where one of its values is missing."""
        if value is None or earlier is None or self.before is None or self.now.at <= self.before.at:
            return None
        start = earlier if earlier <= value else 0.0
        return (value - start) / (self.now.at - self.before.at)

    def rate(self, name: str, process: str | None = None) -> float | None:
        """Return the rate of a sample, of one process or summed over all."""
        earlier = None if self.before is None else self.before.value(name, process)
        return self.per_second(self.now.value(name, process), earlier)

    def gained(self, name: str, **labels: str) -> float:
        """Return what a counter gained, or its whole value where it gained nothing."""
        newest = self.now.value(name, **labels) or 0.0
        gained = newest - (self.before.value(name, **labels) or 0.0 if self.before else 0.0)
        return gained if gained > 0 else newest


def _rates(interval: Interval) -> Rates:
    def rate_of_groups(*excluded: str) -> float | None:
        sums: list[float | None] = []
        for moment in (interval.now, interval.before):
            counts = moment.by("headway_groups", "state") if moment else {}
            counted = [count for state, count in counts.items() if state not in excluded]
            sums.append(sum(counted) if counts else None)
        return interval.per_second(*sums)

    generated = [
        rate
        for name in interval.now.processes
        if (rate := interval.rate("headway_tokens_generated_total", name)) is not None
    ]
    return Rates(
        issued=rate_of_groups(),
        leased=rate_of_groups("queued"),
        accepted=interval.rate("headway_results_accepted_total"),
        taken=rate_of_groups("queued", "leased", "ready", "dropped", "failed"),
        trained=interval.rate("headway_version"),
        tokens_generated=sum(generated) if generated else None,
        tokens_trained=interval.rate("headway_tokens_trained_total"),
        updates=interval.rate("headway_weight_updates_total"),
        update_bytes=interval.rate("headway_weight_update_bytes_total"),
    )


def _actor(name: str, interval: Interval) -> ActorView:
    now, engine = interval.now, name.replace("actor", "engine")
    running = _whole(now.value("headway_running_rollouts", name)) or 0
    idle = interval.rate("headway_idle_seconds_total", name)
    if now.processes[name] is None:
        state = "does not answer"
    elif not now.value("headway_serving_seconds_total", name):
        state = "loads the model or its first weights"
    else:
        state = "generates" if running else "waits for prompts"
    return ActorView(
        name=name,
        state=state,
        version=_whole(now.value("headway_engine_version", engine=engine)),
        running=running,
        tokens_per_second=interval.rate("headway_tokens_generated_total", name),
        idle=None if idle is None else min(1.0, idle),
    )


def _lags(interval: Interval) -> dict[str, float]:
    counts = interval.now.by("headway_token_lag_bucket", "le")
    if interval.before is not None:
        earlier = interval.before.by("headway_token_lag_bucket", "le")
        since = {bound: count - earlier.get(bound, 0.0) for bound, count in counts.items()}
        if any(since.values()) and min(since.values()) >= 0:
            counts = since
    shares, below, lowest = {}, 0.0, 0
    total = counts.get("+Inf") or 0.0
    for bound, count in counts.items():
        if count > below:
            last = "" if bound == "+Inf" else str(int(float(bound)))
            label = last if last == str(lowest) else f"{lowest}–{last}"
            shares[label] = (count - below) / total
        below = count
        lowest = lowest if bound == "+Inf" else int(float(bound)) + 1
    return shares


def _phases(interval: Interval) -> dict[str, float]:
    """Return shares of the learner's time, which is counted when a batch ends."""
    spent = {
        phase: interval.gained("headway_learner_seconds_total", phase=phase) for phase in PHASES
    }
    total = sum(spent.values())
    return {phase: seconds / total for phase, seconds in spent.items()} if total else {}


def _troubles(now: Moment) -> list[str]:
    troubles = [f"{name} does not answer" for name, seen in now.processes.items() if seen is None]
    if now.value("headway_paused"):
        troubles.append("paused: the broker's disk is full")
    lag, bound = now.value("headway_max_lag"), now.value("headway_max_staleness")
    if lag is not None and bound is not None and lag > bound:
        troubles.append(f"a token of lag {lag:g} was trained, above max_staleness = {bound:g}")
    if failed := now.value("headway_groups", state="failed"):
        troubles.append(f"groups that failed permanently: {failed:g}")
    if overdue := now.value("headway_overdue_groups"):
        troubles.append(f"groups that are overdue: {overdue:g}")
    for samples in now.processes.values():
        for (name, labels), seconds in (samples or {}).items():
            if name == "headway_overdue_wait_seconds":
                wait = dict(labels)
                troubles.append(f"{wait['who']} waits on {wait['on']} for {seconds:.0f} s")
    return troubles


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
