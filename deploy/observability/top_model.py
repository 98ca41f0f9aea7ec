"""What `headway top` shows of a run, from two moments of its metrics: pure, no figure is stored.

Rates are taken between the moments; a process that was made again in between counts from 0.
Leaves out asking (`deploy.observability.run_client`) and how it looks
(`deploy.observability.top_view`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.observability.prometheus_text import Moment

PHASES = ("wait", "step", "publish")
"""Of the learner."""
LAST_BATCH = "headway_last_batch_timestamp_seconds"
LEARNING = {
    "reward": "headway_reward_mean",
    "ESS": "headway_ess",
    "length": "headway_response_length_mean",
    "entropy": "headway_entropy_mean",
    "grad norm": "headway_grad_norm",
}
"""Figures of the newest batch."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in the run."""

    at: float
    """Epoch seconds."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorView:
    """One rollout actor."""

    name: str
    state: str
    version: int | None
    """What its engine serves."""
    running: int
    """Rollouts being generated."""
    tokens_per_second: float | None
    idle: float | None
    """Share of the time between the moments without a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second, between two moments; None where there is only one, or nobody says."""

    issued: float | None
    """Groups."""
    leased: float | None
    """Groups."""
    accepted: float | None
    """Results, evaluations included."""
    taken: float | None
    """Groups."""
    trained: float | None
    """Batches."""
    tokens_generated: float | None
    tokens_trained: float | None
    updates: float | None
    """Weight updates of all engines."""
    update_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One frame."""

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
    since_batch: float | None
    """Seconds since the newest batch."""
    troubles: Sequence[str]
    """What somebody should look at."""
    events: Sequence[Event]


def view(now: Moment, before: Moment | None, events: Sequence[Event]) -> View:
    """One frame.

    Args:
        now: The newest moment.
        before: An earlier one, of the same run; None at the beginning.
        events: The newest ones, oldest first.
    """
    states = {state: int(count) for state, count in now.by("headway_groups", "state").items()}
    ready, ended = now.value("headway_ready_oldest_seconds"), now.value(LAST_BATCH)
    return View(
        run=now.run,
        at=now.at,
        version=_whole(now.value("headway_version")),
        steps=_whole(now.value("headway_steps")),
        max_staleness=_whole(now.value("headway_max_staleness")),
        groups=states,
        live=_whole(now.value("headway_live_groups")),
        window=_whole(now.value("headway_window_groups")),
        oldest_ready_seconds=ready,
        oldest_queued_seconds=now.value("headway_queued_oldest_seconds"),
        waits_for=_whole(now.value("headway_learner_waits_for_groups")),
        rates=_rates(now, before),
        actors=[_actor(name, now, before) for name in now.processes if name.startswith("actor-")],
        lags=_lags(now, before),
        phases=_phases(now, before),
        update_seconds=_update_seconds(now, before),
        learning=_learning(now),
        since_batch=None if ended is None else max(0.0, now.at - ended),
        troubles=_troubles(now),
        events=events,
    )


def _rates(now: Moment, before: Moment | None) -> Rates:
    def groups(moment: Moment, *, without: tuple[str, ...]) -> float | None:
        counts = moment.by("headway_groups", "state")
        return sum(n for state, n in counts.items() if state not in without) if counts else None

    def of_groups(*without: str) -> float | None:
        earlier = None if before is None else groups(before, without=without)
        return _per_second(groups(now, without=without), earlier, now, before)

    return Rates(
        issued=of_groups(),
        leased=of_groups("queued"),
        accepted=_rate("headway_results_accepted_total", now, before),
        taken=of_groups("queued", "leased", "ready", "dropped", "failed"),
        trained=_rate("headway_version", now, before),
        tokens_generated=_sum(
            _rate("headway_tokens_generated_total", now, before, name) for name in now.processes
        ),
        tokens_trained=_rate("headway_tokens_trained_total", now, before),
        updates=_rate("headway_weight_updates_total", now, before),
        update_bytes=_rate("headway_weight_update_bytes_total", now, before),
    )


def _actor(name: str, now: Moment, before: Moment | None) -> ActorView:
    engine = name.replace("actor", "engine")
    running = _whole(now.value("headway_running_rollouts", name)) or 0
    idle = _rate("headway_idle_seconds_total", now, before, name)
    version = _whole(now.value("headway_engine_version", engine=engine))
    if now.processes[name] is None:
        state = "does not answer"
    elif not now.value("headway_serving_seconds_total", name):
        state = "loads the model or its first weights"
    else:
        state = "generates" if running else "waits for prompts"
    return ActorView(
        name=name,
        state=state,
        version=version,
        running=running,
        tokens_per_second=_rate("headway_tokens_generated_total", now, before, name),
        idle=None if idle is None else min(1.0, idle),
    )


def _learning(now: Moment) -> dict[str, float]:
    figures = {label: now.value(name) for label, name in LEARNING.items()}
    figures["held-out"] = now.value("headway_heldout_score", kind="greedy")
    return {label: value for label, value in figures.items() if value is not None}


def _lags(now: Moment, before: Moment | None) -> dict[str, float]:
    newest = now.by("headway_token_lag_bucket", "le")
    counts = newest
    if before is not None:
        earlier = before.by("headway_token_lag_bucket", "le")
        since = {top: count - earlier.get(top, 0.0) for top, count in newest.items()}
        if any(since.values()) and min(since.values()) >= 0:
            counts = since
    shares, below, lowest = {}, 0.0, 0
    total = counts.get("+Inf") or 0.0
    for top, count in counts.items():
        if count > below:
            last = "" if top == "+Inf" else str(int(float(top)))
            label = last if last == str(lowest) else f"{lowest}–{last}"
            shares[label] = (count - below) / total
        below = count
        lowest = lowest if top == "+Inf" else int(float(top)) + 1
    return shares


def _phases(now: Moment, before: Moment | None) -> dict[str, float]:
    """The learner's time counts when a batch ends; shares are of what ended in between."""
    spent = {
        phase: _since("headway_learner_seconds_total", now, before, phase=phase) for phase in PHASES
    }
    total = sum(spent.values())
    return {phase: seconds / total for phase, seconds in spent.items()} if total else {}


def _update_seconds(now: Moment, before: Moment | None) -> float | None:
    seconds = _since("headway_weight_update_seconds_total", now, before, phase="serve")
    count = _since("headway_weight_updates_total", now, before)
    return seconds / count if count else None


def _troubles(now: Moment) -> list[str]:
    found = [f"{name} does not answer" for name, said in now.processes.items() if said is None]
    if now.value("headway_paused"):
        found.append("paused: the broker's disk is full")
    lag, bound = now.value("headway_max_lag"), now.value("headway_max_staleness")
    if lag is not None and bound is not None and lag > bound:
        found.append(f"a token of lag {lag:g} was trained, above max_staleness = {bound:g}")
    if failed := now.value("headway_groups", state="failed"):
        found.append(f"groups that failed for good: {failed:g}")
    if late := now.value("headway_overdue_groups"):
        found.append(f"groups that are overdue: {late:g}")
    for process in now.processes.values():
        for (name, labels), seconds in (process or {}).items():
            if name == "headway_overdue_wait_seconds":
                wait = dict(labels)
                found.append(f"{wait['who']} waits on {wait['on']} for {seconds:.0f} s")
    return found


def _since(name: str, now: Moment, before: Moment | None, **labels: str) -> float:
    """What a counter gained since, or all of it where that is nothing or less."""
    newest = now.value(name, **labels) or 0.0
    gained = newest - (before.value(name, **labels) or 0.0 if before else 0.0)
    return gained if gained > 0 else newest


def _rate(
    name: str, now: Moment, before: Moment | None, process: str | None = None, **labels: str
) -> float | None:
    earlier = None if before is None else before.value(name, process, **labels)
    return _per_second(now.value(name, process, **labels), earlier, now, before)


def _per_second(
    value: float | None, earlier: float | None, now: Moment, before: Moment | None
) -> float | None:
    if value is None or earlier is None or before is None or now.at <= before.at:
        return None
    start = earlier if earlier <= value else 0.0
    return (value - start) / (now.at - before.at)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
