"""Selection bias: groups left out of training compared with trained groups.

A policy that does not wait for stragglers (`queues.on_overdue`) favours prompts with short answers,
which are often the easy prompts. The ledger shows how much:

    trained   groups that were trained by their deadline
    late      groups that were trained after it: whole, or masked, less the tokens that were too old
    dropped   overdue: leased groups that were aborted, and ready ones that missed the last batch
    filtered  groups that were dropped since their result holds no signal
    failed    groups that failed for good, if there are any
    timeout   those of them whose rollouts took longer than actors.rollout_timeout_seconds

    age       versions: the lag of the oldest token when the group was trained; of a dropped group
              the lag that it would have had in the batch after the one taken without it
    seconds   from the last lease to the result, the abort or the failure: a lower bound of what it
              would take
    tokens    sampled per rollout, a mean over the group; and
    reward    a mean over the group: both only of groups with a result, so not of aborted groups

Seconds are therefore the only length that is known of every group. The bias is their mean over all
groups that were trained, overdue or failed, divided by the mean over the trained groups: 1 if
nothing was left out, otherwise a lower bound of the factor by which trained groups were shorter.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from statistics import fmean
from typing import NamedTuple, Self

from queues.records import Purpose
from queues.state.groups import OVERDUE, State

MEASURES = ("age", "seconds", "tokens", "reward")
FATES = ("trained", "late", "dropped", "filtered")
FAILURES = ("failed", "timeout")
LEFT_OUT = ("dropped", *FAILURES)
_FATES = f"""
SELECT CASE WHEN state = '{State.TRAINED}' AND trained_version > deadline_version THEN 'late'
        WHEN state = '{State.TRAINED}' THEN 'trained'
        WHEN reason = '{OVERDUE}' THEN 'dropped' WHEN state = '{State.DROPPED}' THEN 'filtered'
        WHEN reason = 'timeout' THEN 'timeout' ELSE 'failed' END,
    coalesce(trained_version, dropped_version + 1) - coalesce(oldest_version, start_version),
    max(0.0, coalesce(accepted_at, dropped_at) - leased_at), -- the clocks may be of two sessions
    tokens * 1.0 / rollouts, reward
FROM groups LEFT JOIN results USING (group_id)
WHERE purpose = '{Purpose.TRAIN}'
    AND state IN ('{State.TRAINED}', '{State.DROPPED}', '{State.FAILED}')
"""
"""The columns of a `Fate`."""


class Fate(NamedTuple):
    """The end of one train group; a measure is None if it is unknown."""

    name: str
    """One of FATES or FAILURES."""
    age: int | None = None
    seconds: float | None = None
    tokens: float | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A measure over the groups for which it is known."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Summarise values; percentiles are by nearest rank, all None without values."""
        ordered = sorted(values)
        return cls(
            count=len(ordered),
            mean=fmean(ordered) if ordered else None,
            p50=_percentile(ordered, 0.50),
            p95=_percentile(ordered, 0.95),
            max=ordered[-1] if ordered else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasReport:
    """Distributions of every measure for every fate, and the bias."""

    groups: Mapping[str, int]
    fates: Mapping[str, Mapping[str, Distribution]]
    """Distribution by fate and measure."""
    bias: float | None
    """Factor by which trained groups were shorter, at least; None if nothing was trained."""
    tokens_masked: int = 0
    """Sampled tokens of trained groups that were too old for the loss."""


def compare(fates: Iterable[Fate], *, tokens_masked: int = 0) -> BiasReport:
    """Return the report on some groups.

    Example:
        >>> report = compare([Fate(name="trained", seconds=1.0), Fate(name="dropped", seconds=3.0)])
        >>> report.bias, report.groups["dropped"]
        (2.0, 1)
    """
    by_name: dict[str, list[Fate]] = {name: [] for name in FATES}
    for fate in fates:
        by_name.setdefault(fate.name, []).append(fate)
    trained = _known("seconds", by_name["trained"] + by_name["late"])
    left_out = _known("seconds", [x for name in LEFT_OUT for x in by_name.get(name, ())])
    return BiasReport(
        groups={name: len(ended) for name, ended in by_name.items()},
        fates={
            name: {measure: Distribution.of(_known(measure, ended)) for measure in MEASURES}
            for name, ended in by_name.items()
        },
        bias=fmean(trained + left_out) / fmean(trained) if any(trained) else None,
        tokens_masked=tokens_masked,
    )


def report_bias(database: Connection) -> BiasReport:
    """Return the report on the run of an open ledger (`queues.readers.open_run.open_ledger`)."""
    rows = database.execute("SELECT statistics FROM batches WHERE acked_at IS NOT NULL")
    masked = sum(json.loads(text).get("tokens_too_old", 0) for (text,) in rows)
    return compare((Fate(*row) for row in database.execute(_FATES)), tokens_masked=masked)


def _known(measure: str, fates: Iterable[Fate]) -> list[float]:
    values = (getattr(fate, measure) for fate in fates)
    return [value for value in values if value is not None]


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
