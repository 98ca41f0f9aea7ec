"""Figures of `headway top`: metrics of all processes of a run at one moment, and between two.

Rates are taken between two moments; a process restarted in between counts from 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headway.errors import InputError

TOKENS = "headway_tokens_generated_total"
Samples = Sequence[Sample]
Event = tuple[float, str]
"""The time of something that happened in the run, in epoch seconds, and its description."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Metrics of a run at one moment."""

    at: float
    """Epoch seconds on the machine that asks."""
    run: str
    processes: Mapping[str, Samples | None]
    """By name, as "actor-0", in the run's order; None where a process does not answer."""

    def value(self, name: str, process: str | None = None, **labels: str) -> float | None:
        """Return the sum of the samples with a name and labels; None where there is none.

        The name includes `_total`. With `process`, only samples of this process count.
        """
        samples = self.samples(name, process)
        values = [s.value for s in samples if labels.items() <= s.labels.items()]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a sample by the values of a label, in the order of the text."""
        sums: dict[str, float] = {}
        for sample in self.samples(name):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def samples(self, name: str, process: str | None = None) -> Iterator[Sample]:
        """Yield the samples with a name, of one process or of all."""
        for origin, samples in self.processes.items():
            if process in (None, origin):
                yield from (sample for sample in samples or () if sample.name == name)


def parse(text: str, *, source: str) -> Samples:
    """Parse the samples of one scrape; raise InputError, naming its source, for any other text."""
    try:
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{source} shows no metrics in Prometheus' format: {error}") from None


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two moments of a run, or only the newest moment."""

    now: Moment
    before: Moment | None = None

    def rate(self, name: str, process: str | None = None) -> float | None:
        """Return a counter's rate per second, of one process or all; None if not asked before."""
        if self.before is None:
            return None
        rates = [
            self._per_second(self.now.value(name, origin), self.before.value(name, origin))
            for origin in (self.now.processes if process is None else [process])
        ]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def rate_of_groups(self, *excluded: str) -> float | None:
        """Return the rate at which groups entered any state but those excluded, per second."""
        sums: list[float | None] = []
        for moment in (self.now, self.before):
            counts = moment.by("headway_groups", "state") if moment else {}
            counted = [count for state, count in counts.items() if state not in excluded]
            sums.append(sum(counted) if counts else None)
        return self._per_second(*sums)

    def gained(self, name: str, **labels: str) -> float:
        """Return what a counter gained, or its whole value where it gained nothing."""
        newest = self.now.value(name, **labels) or 0.0
        gained = newest - (self.before.value(name, **labels) or 0.0 if self.before else 0.0)
        return gained if gained > 0 else newest

    def _per_second(self, value: float | None, earlier: float | None) -> float | None:
        if value is None or earlier is None or self.before is None or self.now.at <= self.before.at:
            return None
        start = earlier if earlier <= value else 0.0
        return (value - start) / (self.now.at - self.before.at)


def actor_state(name: str, now: Moment) -> str:
    """Describe what a rollout actor does."""
    if now.processes[name] is None:
        return "does not answer"
    if not now.value("headway_serving_seconds_total", name):
        return "loads the model or its first weights"
    return "generates" if now.value("headway_running_rollouts", name) else "waits for prompts"


def update_seconds(interval: Interval) -> float | None:
    """Return the mean time from publication to generating with the new weights."""
    updates = interval.gained("headway_weight_updates_total")
    serving = interval.gained("headway_weight_update_seconds_total", phase="serve")
    return serving / updates if updates else None


def token_lags(interval: Interval) -> dict[str, float]:
    """Return shares of the tokens trained between the moments, or ever, by lag."""
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


def learner_phases(interval: Interval) -> dict[str, float]:
    """Return shares of the learner's time, which is counted when a batch ends."""
    phases = ("wait", "step", "publish")
    return _shares(interval, "headway_learner_seconds_total", "phase", phases)


def agent_waits(interval: Interval) -> dict[str, float]:
    """Return shares of the time of agents' sessions that ended, by who was waited for."""
    whom = ("model", "agent")
    return _shares(interval, "headway_agent_seconds_total", "waiting_for", whom)


def _shares(interval: Interval, name: str, label: str, values: Sequence[str]) -> dict[str, float]:
    """Return what each value of a label gained, as shares; empty where there is nothing."""
    spent = {value: interval.gained(name, **{label: value}) for value in values}
    total = sum(spent.values())
    return {value: seconds / total for value, seconds in spent.items()} if total else {}


def troubles(now: Moment) -> list[str]:
    """List problems that need attention."""
    problems = [f"{name} does not answer" for name, seen in now.processes.items() if seen is None]
    if now.value("headway_paused"):
        problems.append("paused: the broker waits for its disk or its backup")
    lag, bound = now.value("headway_max_lag"), now.value("headway_max_staleness")
    if lag is not None and bound is not None and lag > bound:
        problems.append(f"a token of lag {lag:g} was trained, above max_staleness = {bound:g}")
    if failed := now.value("headway_groups", state="failed"):
        problems.append(f"groups that failed permanently: {failed:g}")
    if overdue := now.value("headway_overdue_groups"):
        problems.append(f"groups that are overdue: {overdue:g}")
    for wait in now.samples("headway_overdue_wait_seconds"):
        who, on = wait.labels["who"], wait.labels["on"]
        problems.append(f"{who} waits on {on} for {wait.value:.0f} s")
    return problems
