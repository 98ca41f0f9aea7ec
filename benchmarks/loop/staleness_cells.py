"""Cells of the study of staleness: the runs with one bound and one correction; pure.

The figures of a cell are estimates over seeds, those beside another cell of ratios or differences
within a seed. A time to the target is claimed only of cells whose every seed reaches it: the seeds
that do are the fast ones.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.harness.checkpoint_scores import seconds_to
from benchmarks.harness.record import Record
from benchmarks.loop.seed_intervals import Estimate, estimate, estimate_ratio
from deploy.report.staleness_window import BUSY
from queues.config import DEFAULT_CEILING

Run = Mapping[str, Any]
"""Figures of one run; its name is the bound and its kind the correction."""
Cell = Mapping[str, Any]
"""Bound, correction, limit, and figures by name: estimates over seeds, None where no run has one;
`lag_max` is the largest of all seeds, `reached` says how many seeds reach the target, and
`seconds_of_seeds` has their times by seed where all do."""
SYNCHRONOUS, UNBOUNDED, AUTO = "0", "inf", "auto"
HELD = {UNBOUNDED: 16, AUTO: DEFAULT_CEILING}
"""Without a number as bound the engines hold as many groups as with this one."""
UNCORRECTED = "none"
"""The correction that trains stale tokens as if they were new."""
FIGURES = (
    *("samples_per_second", "tokens_per_rollout", "simulated"),
    *("learner_idle", "actors_idle", "pauses", "batches"),
    *("lag_mean", "predicted_lag", "lag_p5", "lag_p50", "lag_p95"),
    *("batches_in_engines", "batches_ready", "ess", "kl", "cut", "window", "moves"),
    *("score", "score_in_time", "speed_off", "lag_off"),
)
TO_TARGET = ("batches_to_target", "seconds_to_target")


def eta(bound: str) -> str:
    """Return a bound as text."""
    return {UNBOUNDED: "no bound", AUTO: "a bound set by the run"}.get(bound, f"η = {bound}")


def held(bound: str) -> int:
    """Return the batches beside the one in training that engines may hold."""
    return HELD[bound] if bound in HELD else int(bound)


def in_order(bound: str) -> tuple[bool, float]:
    """Return the key by which bounds are sorted: numbers, no bound, and that of the run."""
    return bound == AUTO, 0.0 if bound == AUTO else float(bound)


def derived(run: Run, seconds: float, target: float | None, size: int) -> Run:
    """Return a run with its score after some seconds, its time to a score, and quantiles of lag.

    `size` is the number of groups of a batch. `speed_off`, a share, and `lag_off`, in versions, are
    the errors of predictions, None without any. Of a run that set its bound itself also the mean of
    its windows and the number of their moves.
    """
    curve, windows, predicted = run["curve"], run.get("windows"), "simulated" in run
    lags, shares = zip(*run["lags"].items(), strict=True)
    versions = [*map(int, lags)]
    of_lags = np.percentile(versions, (5, 50, 95), weights=shares, method="inverted_cdf")
    by_batch = [*zip(run["versions"], (score for _, score in curve), strict=True)]
    return {
        **run,
        **dict(zip(("lag_p5", "lag_p50", "lag_p95"), of_lags.tolist(), strict=True)),
        "window": fmean(windows) if windows else None,
        "moves": sum(a != b for a, b in pairwise(windows)) if windows else None,
        "batches_in_engines": run["groups_in_engines"] / size,
        "batches_ready": run["groups_ready"] / size,
        "speed_off": abs(run["simulated"] / run["samples_per_second"] - 1) if predicted else None,
        "lag_off": abs(run["predicted_lag"] - run["lag_mean"]) if predicted else None,
        "score_in_time": interpolated(curve, seconds),
        "seconds_to_target": None if target is None else seconds_to(curve, target),
        "batches_to_target": None if target is None else seconds_to(by_batch, target),
    }


def interpolated(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Return the score at a time, between two points of a curve; beyond its ends, that there."""
    times, scores = zip(*curve, strict=True)
    return float(np.interp(at, times, scores))


def cells_of(runs: Sequence[Run], own: str, stale: str) -> list[Cell]:
    """Return the cells of runs, by bound, the recipe's own correction first."""
    groups: defaultdict[tuple[str, str], dict[int, Run]] = defaultdict(dict)
    for run in runs:
        groups[run["name"], run["kind"]][run["seed"]] = run
    ordered = sorted(groups, key=lambda cell: (in_order(cell[0]), cell[1] != own))
    zero = groups.get((SYNCHRONOUS, own), {})
    seeds = len({run["seed"] for run in runs})
    plain = groups.get((stale, UNCORRECTED), {})
    cells = [
        cell_of(*key, groups[key], zero=zero, plain=plain if key[0] == stale else {}, seeds=seeds)
        for key in ordered
    ]
    return [
        {**cell, "limit": "admission"}
        if cell["limit"] == "generation" and is_outrun(cell, cells)
        else cell
        for cell in cells
    ]


def is_outrun(cell: Cell, cells: Sequence[Cell]) -> bool:
    """Return True if a larger bound with the same correction trains BUSY more samples a second.

    Engines that always have a rollout may still have free slots while long ones end. A run that
    sets its bound could have chosen any other.
    """
    bound, correction = cell["bound"], cell["correction"]
    larger = [
        other["samples_per_second"].mean
        for other in cells
        if other["correction"] == correction and other["bound"] != AUTO
        if bound == AUTO or in_order(other["bound"]) > in_order(bound)
    ]
    own: float = cell["samples_per_second"].mean
    return any(other > (1 + BUSY) * own for other in larger)


def cell_of(
    bound: str,
    correction: str,
    runs: Mapping[int, Run],
    *,
    zero: Mapping[int, Run],
    plain: Mapping[int, Run],
    seeds: int,
) -> Cell:
    """Return the cell of runs by seed.

    It stands beside those with η = 0 (`zero`) and, at the same bound, those without correction
    (`plain`). `seeds` are all of the study: a run that failed has not reached the target.
    """

    def beside(others: Mapping[int, Run]) -> list[tuple[Run, Run]]:
        return [] if others is runs else [(runs[s], others[s]) for s in runs.keys() & others.keys()]

    def less(others: Mapping[int, Run], figure: str) -> Estimate | None:
        return estimate(run[figure] - other[figure] for run, other in beside(others))

    figures = {name: estimate(run.get(name) for run in runs.values()) for name in FIGURES}
    shares = (figures[name] for name in ("learner_idle", "actors_idle", "pauses"))
    times = {seed: run["seconds_to_target"] for seed, run in runs.items()}
    reached = sum(seconds is not None for seconds in times.values())
    every = reached == seeds
    speed = "samples_per_second"
    return {
        "bound": bound,
        "correction": correction,
        "seeds": sorted(runs),
        "limit": limit(*(share.mean for share in shares if share)),
        **figures,
        "lag_max": max(run["lag_max"] for run in runs.values()),
        "reached": f"{reached} of {seeds}",
        "seconds_of_seeds": times if every else {},
        **{n: estimate(run[n] for run in runs.values()) if every else None for n in TO_TARGET},
        "speedup": estimate_ratio(run[speed] / other[speed] for run, other in beside(zero)),
        "score_less_synchronous": less(zero, "score"),
        "score_in_time_less_synchronous": less(zero, "score_in_time"),
        "score_less_uncorrected": less(plain, "score"),
    }


def limit(learner_idle: float, actors_idle: float, pauses: float) -> str:
    """Return what limits throughput, a key of LIMITS, from shares of the time of one cell."""
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


def compared(record: Record) -> list[Cell]:
    """Return the cells whose scores are compared with those of others."""
    cells: list[Cell] = record["cells"]
    return [cell for cell in cells if is_compared(record, cell["bound"], cell["correction"])]


def is_compared(record: Record, bound: str, correction: str) -> bool:
    """Return False for a cell of the first seed alone, whose place is in the map."""
    return correction == record["own"] or bound == str(record["stale"])
