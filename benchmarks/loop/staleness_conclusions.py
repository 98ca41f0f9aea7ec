"""Conclusions from the cells of the study of staleness, and what they cannot tell; pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean

from benchmarks.harness.checkpoint_scores import seconds_to
from benchmarks.harness.record import Record
from benchmarks.loop.seed_intervals import CHANCE, LEAST_SEEDS, Estimate, estimate_ratio
from benchmarks.loop.staleness_cells import (
    AUTO,
    SYNCHRONOUS,
    Cell,
    cells_of,
    compared,
    derived,
    eta,
    held,
    is_compared,
    of_bounds,
)

GAIN = 0.9
"""Share of the gain of η = 0 that is the target, where none is given."""
FILLED = 5
"""Windows of batches after which lags are no longer those of the beginning."""
GROWTH = 0.05
"""Share by which the mean lag at the next larger bound may be larger where it does not grow."""
DIFFERENCES = {
    "score_less_synchronous": "with η = 0",
    "score_in_time_less_synchronous": "with η = 0",
    "score_less_uncorrected": "without correction",
}
"""Differences in score, and what they are to."""
UNLIKE = 0.05
"""Share by which the rollouts of a bound are longer or shorter, so that samples are not alike."""
LIMITS = {
    "learner": "the learner always has a batch, and groups that are ready wait for it",
    "generation": "the engines always have rollouts or take new weights, and the learner waits",
    "updates": "the engines stand still while they take new weights",
    "admission": "fewer groups may be live than would keep both sides busy",
}
"""The reasons why throughput is not larger."""


def conclude(record: Record) -> Record:
    """Return the cells, target, equal time, sentences and doubts; nothing without runs.

    The equal time is the longest that every run has trained whose score is compared.
    """
    arms, own = record["arms"], record["own"]
    if not arms:
        return {}
    zero = {run["seed"]: run for run in arms if (run["name"], run["kind"]) == (SYNCHRONOUS, own)}
    seconds = min(
        run["curve"][-1][0] for run in arms if is_compared(record, run["name"], run["kind"])
    )
    target = record["target"]
    if target is None and zero:
        first, last = (fmean(run["curve"][end][1] for run in zero.values()) for end in (0, -1))
        target = first + GAIN * (last - first) if last > first else None
    runs = [derived(run, seconds, target, record["batch"][0]) for run in arms]
    cells = cells_of(runs, own, str(record["stale"]))
    shown = {**record, "cells": cells, "equal_seconds": seconds, "target_score": target}
    return {
        **{name: shown[name] for name in ("cells", "equal_seconds", "target_score")},
        "sentences": [*sentences(shown)],
        "doubts": [*doubts(shown)],
    }


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
    yield from prediction_sentences(record)
    yield from lag_sentences(bounds)
    for cell in [cell for cell in bounds if cell["bound"] == AUTO and cell["window"]]:
        yield (
            f"A run that sets its bound lets groups be {cell['window'].text('.1f')} versions old, "
            f"moved {cell['moves'].text('.1f')} times in {cell['batches'].mean:.0f} batches, with "
            f"a mean lag of {cell['lag_mean'].text('.2f')}."
        )
    yield from score_sentences(record)
    if (target := record["target_score"]) is not None:
        yield target_sentence(bounds, target)


def prediction_sentences(record: Record) -> Iterator[str]:
    """Yield how far predictions by the rates of the reference are off, at the worst other bound."""
    reference = record["reference"]
    cells = [cell for cell in of_bounds(record) if cell["speed_off"] and cell["bound"] != reference]
    if cells:
        single = max(
            abs(run["simulated"] / run["samples_per_second"] - 1)
            for run in record["arms"]
            if "simulated" in run and run["name"] != reference
        )
        speed, lag = (
            max(cells, key=lambda cell: cell[name].mean) for name in ("speed_off", "lag_off")
        )
        yield (
            f"From the rates of the run with {eta(reference)}, samples per second are predicted "
            f"within {100 * speed['speed_off'].mean:.1f} % (worst with {eta(speed['bound'])}), and "
            f"mean lag within {lag['lag_off'].mean:.2f} versions (worst with {eta(lag['bound'])}), "
            f"in the mean over seeds. Throughput of one run is off by up to {100 * single:.0f} %."
        )


def score_sentences(record: Record) -> Iterator[str]:
    """Yield the differences in score after equal batches and equal time, by verdict."""
    ends = (f"{record['steps']} batches", f"{record['equal_seconds']:.0f} s")
    for (name, other), end in zip(DIFFERENCES.items(), (*ends, ends[0]), strict=True):
        by_verdict: defaultdict[str, list[str]] = defaultdict(list)
        for cell in compared(record):
            if difference := cell[name]:
                shown = f"{difference.text('+.3f')} with {eta(cell['bound'])}"
                by_verdict[verdict(difference, other)].append(f"{shown} and {cell['correction']}")
        for words, differences in by_verdict.items():
            yield f"After the same {end} {words}: {', '.join(differences)}."


def verdict(difference: Estimate, other: str) -> str:
    """Return the words for a difference in score to that of other runs."""
    if difference.low is None or difference.high is None:
        return f"a difference in score to that {other} may be chance, of {difference.seeds} seed(s)"
    if difference.low <= 0 <= difference.high:
        return f"it is open whether the score differs from that {other}, and by how much"
    return f"the score is {'higher' if difference.low > 0 else 'lower'} than {other}, each at 95 %"


def lag_sentences(bounds: Sequence[Cell]) -> Iterator[str]:
    """Yield where lag does not grow with the bound, and where groups are at the largest bound."""
    for before, cell in pairwise(cell for cell in bounds if cell["bound"] != AUTO):
        less, more = before["lag_mean"], cell["lag_mean"]
        if more.high is not None and less.low and more.high < less.low * (1 + GROWTH):
            yield (
                f"Mean lag does not grow from {eta(before['bound'])} ({less.text('.2f')}) to "
                f"{eta(cell['bound'])} ({more.text('.2f')}), where {LIMITS[cell['limit']]}."
            )
    for cell in [cell for cell in bounds if cell["bound"].isdecimal()][-1:]:
        yield (
            f"With {eta(cell['bound'])} mean lag is {cell['lag_mean'].mean:.2f}: of "
            f"{int(cell['bound']) + 1} batches that may be live, "
            f"{cell['batches_in_engines'].mean:.1f} are in the engines and "
            f"{cell['batches_ready'].mean:.1f} wait for the learner."
        )


def target_sentence(bounds: Sequence[Cell], target: float) -> str:
    """Return which bound reaches the target first, of those that reach it on all seeds.

    Bounds that may be as fast are named with it, and one set by the run stands beside it.
    """
    cells = {cell["bound"]: cell for cell in bounds if cell["seconds_to_target"]}
    times = {b: cell["seconds_to_target"] for b, cell in cells.items() if b != AUTO}
    if not times:
        but = f", but {eta(AUTO)} does" if AUTO in cells else ""
        return f"No bound reaches a score of {target:.3f} on every seed{but}."
    best = min(times, key=lambda bound: times[bound].mean)
    text = (
        f"A score of {target:.3f} is reached first with {eta(best)}, after "
        f"{times[best].text('.0f')} s"
    )
    ratios = {bound: ratio_of_times(cells, best, bound) for bound in times if bound != best}
    near = [
        eta(bound)
        for bound, ratio in ratios.items()
        if ratio and (ratio.high is None or ratio.high >= 1)
    ]
    if near:
        text += f" (it cannot be told from {', '.join(near)})"
    if best != SYNCHRONOUS and (ratio := ratio_of_times(cells, best, SYNCHRONOUS)):
        text += f", {ratio.text('.2f')} of the time of η = 0"
    if own := ratio_of_times(cells, best, AUTO):
        seconds = cells[AUTO]["seconds_to_target"].text(".0f")
        text += f". With {eta(AUTO)} it takes {seconds} s; the best takes {own.text('.2f')} of that"
    missed = [cell for cell in bounds if not cell["seconds_to_target"]]
    named = (f"{eta(cell['bound'])} ({cell['reached']})" for cell in missed)
    return f"{text}. Not on every seed: {', '.join(named)}." if missed else f"{text}."


def ratio_of_times(cells: Mapping[str, Cell], bound: str, other: str) -> Estimate | None:
    """Return the time to the target with a bound over that with another, within a seed.

    None where one of them is missing, or begins at the target.
    """
    own, others = (cells[b]["seconds_of_seeds"] if b in cells else {} for b in (bound, other))
    return estimate_ratio(own[seed] / s for seed, s in others.items() if s and own.get(seed))


def doubts(record: Record) -> Iterator[str]:
    """Yield what the runs cannot tell."""
    bounds = of_bounds(record)
    if len(bounds) < 2 or bounds[0]["bound"] != SYNCHRONOUS:
        yield "Without η = 0 and another bound nothing can be compared."
    seeds = min((len(cell["seeds"]) for cell in bounds), default=0)
    if seeds < LEAST_SEEDS:
        yield (
            f"Of {seeds} seed(s) no interval is known, and any difference may be chance: give "
            f"--seeds with {LEAST_SEEDS} or more."
        )
    if any(len(cell["seeds"]) < LEAST_SEEDS <= seeds for cell in record["cells"]):
        yield "What stands in the map alone is of one seed, and may be chance."
    yield from doubts_of_many(record)
    yield from doubts_of_score(record)
    yield from doubts_of_target(record)
    young = [
        eta(cell["bound"])
        for cell in bounds
        if cell["batches"].mean < FILLED * (held(cell["bound"]) + 1)
    ]
    if young:
        yield (
            f"With {', '.join(young)} fewer batches were measured than {FILLED} times those that "
            "may be live, so that lag and throughput are still those of the beginning."
        )
    lengths = {
        f"{eta(cell['bound'])} and {cell['correction']}": cell["tokens_per_rollout"].mean
        for cell in (*bounds, *(cell for cell in compared(record) if cell not in bounds))
    }
    first, usual = next(iter(lengths.items()), ("", 0.0))
    if unlike := [name for name, x in lengths.items() if abs(x - usual) > UNLIKE * usual]:
        yield (
            f"With {', '.join(unlike)} rollouts are more than {UNLIKE:.0%} longer or shorter than "
            f"with {first}, so that samples a second are not of equal work."
        )


def doubts_of_many(record: Record) -> Iterator[str]:
    """Yield what follows from comparing many cells at once."""
    differences = (cell[name] for cell in compared(record) for name in DIFFERENCES)
    if (count := sum(x is not None and x.low is not None for x in differences)) > 1:
        yield (
            f"{count} differences in score have a 95 % interval each: if nothing differed, "
            f"{CHANCE * count:.1f} of them are still expected to leave out 0, and several at once, "
            "since they are to the same runs; the best of several bounds or corrections looks "
            "better than it is. Intervals take scores for normally distributed, which those near "
            "their largest value, or of runs that fail at times, are not."
        )
    if len({cell["correction"] for cell in compared(record)}) > 2:
        yield "Corrections are compared with η = 0 and with none, not with one another."


def doubts_of_score(record: Record) -> Iterator[str]:
    """Yield that the score of the first run with η = 0 hardly moved, if so.

    Rewards within [0, 1] of a mean p have a variance of p·(1 − p) at most; of others none is known.
    """
    for run in [run for run in record["arms"] if run["name"] == SYNCHRONOUS][:1]:
        (_, first), (_, last) = run["curve"][0], run["curve"][-1]
        ends = ((first, run["scored"][0]), (last, run["scored"][-1]))
        if not all(0 <= score <= 1 for score, _ in ends):
            yield "Scores are not within 0 and 1, so that their standard error is not known."
            continue
        error = sqrt(sum(score * (1 - score) / count for score, count in ends))
        if last - first < 2 * error:
            yield (
                f"With η = 0 the score moved by {last - first:+.3f}, less than twice a standard "
                f"error of up to {error:.3f}: {record['steps']} batches are too few to compare "
                "scores."
            )


def doubts_of_target(record: Record) -> Iterator[str]:
    """Yield how many of the runs that reached the target were below it again."""
    target = record["target_score"]
    curves = [run["curve"] for run in record["arms"] if run["kind"] == record["own"]]
    times = [None if target is None else seconds_to(curve, target) for curve in curves]
    reached = [(c, time) for c, time in zip(curves, times, strict=True) if time is not None]
    fell = sum(any(s < target for at, s in curve if at > time) for curve, time in reached)
    if fell:
        yield (
            f"{fell} of {len(reached)} runs that reached the target were below it at a later "
            "score: their time is that of the first crossing."
        )
