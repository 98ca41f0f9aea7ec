"""Conclusions from the runs of the study of staleness, with their uncertainty; pure.

The runs with one bound and one correction are a cell. Its figures are estimates over seeds, those
beside η = 0 of ratios or differences within a seed.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from statistics import fmean
from typing import Any

from benchmarks.harness.checkpoint_scores import seconds_to
from benchmarks.harness.record import Record
from benchmarks.loop.seed_intervals import LEAST_SEEDS, Estimate, estimate
from deploy.report.staleness_window import BUSY

Run = Mapping[str, Any]
"""Figures of one run; its name is the bound and its kind the correction."""
Cell = Mapping[str, Any]
"""Bound, correction, limit, and estimates by name; None where no run has the figure."""
SYNCHRONOUS, UNBOUNDED = "0", "inf"
GAIN = 0.9
"""Share of the gain of η = 0 that is the target, where none is given."""
FILLED = 5
"""Windows of batches after which lags are no longer those of the beginning."""
FIGURES = (
    *("samples_per_second", "simulated", "learner_idle", "actors_idle", "pauses", "batches"),
    *("lag_mean", "predicted_lag", "lag_p5", "lag_p50", "lag_p95", "lag_max"),
    *("batches_in_engines", "batches_ready", "ess", "kl", "cut"),
    *("score", "score_in_time", "batches_to_target", "seconds_to_target"),
)
LIMITS = {
    "learner": "the learner always has a batch, and groups that are ready wait for it",
    "generation": "the engines always have rollouts, and the learner waits for them",
    "updates": "the engines stand still while they take new weights",
    "admission": "engines wait for groups that may begin, and the learner for groups that are due",
}
"""The reasons why throughput is not larger."""


def eta(bound: str) -> str:
    """Return a bound as text."""
    return "no bound" if bound == UNBOUNDED else f"η = {bound}"


def conclude(record: Record) -> Record:
    """Return the cells, target, equal time, sentences and doubts; nothing without runs.

    The equal time is the longest that every run has trained.
    """
    arms, own = record["arms"], record["own"]
    if not arms:
        return {}
    zero = {run["seed"]: run for run in arms if (run["name"], run["kind"]) == (SYNCHRONOUS, own)}
    seconds = min(run["curve"][-1][0] for run in arms)
    target = record["target"]
    if target is None and zero:
        first, last = (fmean(run["curve"][end][1] for run in zero.values()) for end in (0, -1))
        target = first + GAIN * (last - first) if last > first else None
    runs = [derived(run, seconds, target, record["batch"][0]) for run in arms]
    cells = cells_of(runs, own)
    shown = {**record, "cells": cells, "equal_seconds": seconds, "target_score": target}
    return {
        **{name: shown[name] for name in ("cells", "equal_seconds", "target_score")},
        "sentences": [*sentences(shown)],
        "doubts": [*doubts(shown)],
    }


def derived(run: Run, seconds: float, target: float | None, size: int) -> Run:
    """Return a run with its score after some seconds, its time to a score, and quantiles of lag."""
    curve, lags = run["curve"], [*map(int, run["lags"])]
    upto = [*accumulate(run["lags"].values())]
    by_batch = [
        (version, score) for version, (_, score) in zip(run["versions"], curve, strict=True)
    ]
    return {
        **run,
        **{
            f"lag_p{percent}": next(
                lag for lag, share in zip(lags, upto, strict=True) if share >= percent / 100 - 1e-9
            )
            for percent in (5, 50, 95)
        },
        "batches_in_engines": run["groups_in_engines"] / size,
        "batches_ready": run["groups_ready"] / size,
        "score_in_time": interpolated(curve, seconds),
        "seconds_to_target": None if target is None else seconds_to(curve, target),
        "batches_to_target": None if target is None else seconds_to(by_batch, target),
    }


def interpolated(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Return the score at a time, between two points of a curve or at its end."""
    for (before, low), (after, high) in pairwise(curve):
        if at <= after:
            return low + (high - low) * (at - before) / (after - before)
    return curve[-1][1]


def cells_of(runs: Sequence[Run], own: str) -> list[Cell]:
    """Return the cells of runs, by bound, the recipe's own correction first."""
    groups: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        groups.setdefault((run["name"], run["kind"]), {})[run["seed"]] = run
    zero = groups.get((SYNCHRONOUS, own), {})
    cells: list[Cell] = []
    for bound, correction in sorted(groups, key=lambda cell: (float(cell[0]), cell[1] != own)):
        of_seeds = groups[bound, correction]
        pairs = [(of_seeds[seed], zero[seed]) for seed in sorted(of_seeds.keys() & zero.keys())]
        pairs = [] if of_seeds is zero else pairs
        values: dict[str, Any] = {
            name: estimate(run.get(name) for run in of_seeds.values()) for name in FIGURES
        }
        speed = "samples_per_second"
        cells.append(
            {
                "bound": bound,
                "correction": correction,
                "seeds": sorted(of_seeds),
                "limit": limit(
                    *(values[n].mean for n in ("learner_idle", "actors_idle", "pauses"))
                ),
                **values,
                "speedup": estimate(run[speed] / other[speed] for run, other in pairs),
                **{
                    f"{name}_less_synchronous": estimate(run[name] - o[name] for run, o in pairs)
                    for name in ("score", "score_in_time")
                },
            }
        )
    return cells


def limit(learner_idle: float, actors_idle: float, pauses: float) -> str:
    """Return what limits throughput, a key of LIMITS, from shares of the time."""
    if learner_idle < BUSY:
        return "learner"
    if actors_idle < BUSY:
        return "generation"
    return "updates" if pauses >= BUSY else "admission"


def of_bounds(record: Record) -> list[Cell]:
    """Return the cells with the recipe's own correction, by bound."""
    return [cell for cell in record["cells"] if cell["correction"] == record["own"]]


def at_stale(record: Record) -> list[Cell]:
    """Return the cells at the bound where corrections are compared; none where they are not."""
    cells = [cell for cell in record["cells"] if cell["bound"] == str(record["stale"])]
    return cells if len(cells) > 1 else []


def sentences(record: Record) -> Iterator[str]:
    """Yield what follows from the runs."""
    bounds = of_bounds(record)
    gains = [(cell["speedup"], eta(cell["bound"])) for cell in bounds if cell["speedup"]]
    if gains:
        listed = ", ".join(f"{gain.text('.2f')} with {bound}" for gain, bound in gains)
        yield f"Samples trained per second over those with η = 0: {listed}."
    for name, reason in LIMITS.items():
        if limited := ", ".join(eta(cell["bound"]) for cell in bounds if cell["limit"] == name):
            yield f"{name.capitalize()} limits throughput with {limited}: {reason}."
    yield from lag_sentences(bounds)
    compared = bounds + [cell for cell in at_stale(record) if cell["correction"] != record["own"]]
    for key, when in (
        ("score", f"{record['steps']} batches"),
        ("score_in_time", f"{record['equal_seconds']:.0f} s"),
    ):
        found: dict[str, list[str]] = {}
        for cell in compared:
            if difference := cell[f"{key}_less_synchronous"]:
                shown = (
                    f"{difference.text('+.3f')} with {eta(cell['bound'])} and {cell['correction']}"
                )
                found.setdefault(verdict(difference), []).append(shown)
        for words, named in found.items():
            yield f"After the same {when} {words}: {', '.join(named)}."
    if (target := record["target_score"]) is not None:
        yield target_sentence(bounds, target)


def verdict(difference: Estimate) -> str:
    """Return the words for a difference in score to η = 0."""
    if difference.low is None or difference.high is None:
        return f"a difference in score to η = 0 may be chance, of {difference.seeds} seed(s)"
    if difference.low <= 0 <= difference.high:
        return "no difference in score to η = 0 was seen"
    return f"the score is {'higher' if difference.low > 0 else 'lower'} than with η = 0"


def lag_sentences(bounds: Sequence[Cell]) -> Iterator[str]:
    """Yield where lag does not grow with the bound, and where groups are at the largest bound."""
    for before, cell in pairwise(bounds):
        less, more = before["lag_mean"].mean, cell["lag_mean"].mean
        if more < less * (1 + BUSY):
            yield (
                f"Mean lag does not grow from {eta(before['bound'])} ({less:.2f}) to "
                f"{eta(cell['bound'])} ({more:.2f}), where {LIMITS[cell['limit']]}."
            )
    for cell in [cell for cell in bounds if cell["bound"] != UNBOUNDED][-1:]:
        yield (
            f"With {eta(cell['bound'])} mean lag is {cell['lag_mean'].mean:.2f}: of "
            f"{int(cell['bound']) + 1} batches that may be live, "
            f"{cell['batches_in_engines'].mean:.1f} are in the engines and "
            f"{cell['batches_ready'].mean:.1f} wait for the learner."
        )


def target_sentence(bounds: Sequence[Cell], target: float) -> str:
    """Return which of the bounds reaches the target first, of those that reach it on all seeds."""
    times = {
        cell["bound"]: reached.mean
        for cell in bounds
        if (reached := cell["seconds_to_target"]) and reached.seeds == len(cell["seeds"])
    }
    if not times:
        return f"No bound reaches a score of {target:.3f} on every seed."
    best = min(times, key=lambda bound: times[bound])
    beside = f", {times[best] / times[SYNCHRONOUS]:.2f} of the time of η = 0"
    return (
        f"A score of {target:.3f} is reached first with {eta(best)}, after {times[best]:.0f} s"
        f"{beside if best != SYNCHRONOUS and SYNCHRONOUS in times else ''}."
    )


def doubts(record: Record) -> Iterator[str]:
    """Yield what the runs cannot tell."""
    bounds, steps = of_bounds(record), record["steps"]
    if len(bounds) < 2 or bounds[0]["bound"] != SYNCHRONOUS:
        yield "Without η = 0 and another bound nothing can be compared."
    seeds = min((len(cell["seeds"]) for cell in bounds), default=0)
    if seeds < LEAST_SEEDS:
        yield (
            f"Of {seeds} seed(s) no interval is known, and any difference may be chance: give "
            f"--seeds with {LEAST_SEEDS} or more."
        )
    elif any(len(cell["seeds"]) < LEAST_SEEDS for cell in record["cells"]):
        yield "Figures without an interval are of fewer than three seeds, and may be chance."
    for run in [run for run in record["arms"] if run["name"] == SYNCHRONOUS][:1]:
        (_, first), (_, last) = run["curve"][0], run["curve"][-1]
        ends = ((first, run["scored"][0]), (last, run["scored"][-1]))
        error = sqrt(sum(max(0.0, score * (1 - score)) / count for score, count in ends))
        if last - first < 2 * error:
            yield (
                f"With η = 0 the score moved by {last - first:+.3f}, less than twice its standard "
                f"error of {error:.3f}: {steps} batches are too few to compare scores."
            )
    young = [
        eta(cell["bound"])
        for cell in bounds
        if cell["bound"] != UNBOUNDED and cell["batches"].mean < FILLED * (int(cell["bound"]) + 1)
    ]
    if young:
        yield (
            f"With {', '.join(young)} fewer batches were measured than {FILLED} times those that "
            "may be live, so that lag and throughput are still those of the beginning."
        )
