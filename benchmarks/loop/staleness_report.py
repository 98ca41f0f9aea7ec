"""The conclusions, tables and picture of `headway bench staleness`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.intervals import interval
from benchmarks.harness.plots import INTERVAL, plot_tradeoff, save_picture, tradeoffs
from benchmarks.harness.tables import Columns
from benchmarks.harness.training_runs import conditions
from benchmarks.loop.comparison_report import (
    BOUND,
    SYNCHRONOUS,
    UNBOUNDED,
    Groups,
    Run,
    group,
    medians_table,
    plot_by_bound,
    plot_scores,
    seeds_of,
)
from deploy.report.plots import new_figure

CORRECTION = "correction"
SPEED = {
    "samples/s": ("samples_per_second", "{:.0f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "tokens/rollout": ("tokens_per_rollout", "{:.1f}"),
    "learner idle": ("learner_idle", "{:.0%}"),
    "actors idle": ("actors_idle", "{:.0%}"),
}
OFF_POLICYNESS = {
    "lag mean": ("lag_mean", "{:.2f}"),
    "p95": ("lag_p95", "{:.0f}"),
    "max": ("lag_max", "{:.0f}"),
    "ESS": ("ess", "{:.4f}"),
    "KL mismatch": ("kl_fresh", "{:.1e}"),
    "KL several": ("kl_crossed", "{:.1e}"),
    "KL stale": ("kl_stale", "{:.1e}"),
    "clipped": ("clipped", "{:.1%}"),
}
"""KL by the versions that sampled a rollout: the trained one itself, so that only numerics differ;
several; an older one alone."""
LEARNING = {
    "score": ("score", "{:.3f}"),
    "seconds": ("seconds", "{:.0f}"),
    "seconds to target": ("seconds_to_target", "{:.0f}"),
}
TABLES: Sequence[tuple[Columns, Mapping[str, str]]] = (
    (SPEED, {"of predicted": "of_predicted", "of unbounded": "of_unbounded"}),
    (OFF_POLICYNESS, {"predicted": "predicted_lag"}),
    (LEARNING, {}),
)
"""Columns of each table, and the conclusions beside them in that of the bounds."""


def conclude(document: Mapping[str, Any]) -> dict[str, Any]:
    """Draw conclusions from the runs; medians over seeds are of ratios within a seed.

    Returns:
        `of_predicted`: by bound, measured over simulated throughput. `of_unbounded`: by bound.
        `predicted_lag`: by bound, median of the simulated mean. `score_difference`: by bound and
        by correction, held-out score less that of η = 0 with the same seed: each, mean, and the
        95 % interval over seeds, None for a single one.
    """
    runs, predictions = document["arms"], document["predictions"]
    bounds = group(runs, BOUND)
    simulated = {(row["name"], row["seed"]): row["simulated"] for row in predictions}
    unbounded = {run["seed"]: run["samples_per_second"] for run in bounds.get(UNBOUNDED, [])}
    synchronous = {run["seed"]: run["score"] for run in bounds.get(SYNCHRONOUS, [])}

    def ratios(reference: Callable[[Run], float | None]) -> dict[str, float]:
        values = {
            name: [run["samples_per_second"] / known for run in same if (known := reference(run))]
            for name, same in bounds.items()
        }
        return {name: median(of_seeds) for name, of_seeds in values.items() if of_seeds}

    lags: dict[str, list[float]] = {}
    for row in predictions:
        lags.setdefault(row["name"], []).append(row["lag_mean"])
    return {
        "of_predicted": ratios(lambda run: simulated.get((run["name"], run["seed"]))),
        "of_unbounded": ratios(lambda run: unbounded.get(run["seed"])),
        "predicted_lag": {name: median(lags[name]) for name in bounds if name in lags},
        "score_difference": {
            kind: _differences(group(runs, kind), synchronous) for kind in (BOUND, CORRECTION)
        },
    }


def _differences(groups: Groups, synchronous: Mapping[int, float]) -> dict[str, Any]:
    """Return the differences in score to the synchronous run of the same seed, by name."""
    differences = {}
    for name, runs in groups.items():
        values = [r["score"] - synchronous[r["seed"]] for r in runs if r["seed"] in synchronous]
        if values and name != SYNCHRONOUS:
            spread = interval(values) if len(values) > 1 else None
            differences[name] = {"each": values, "mean": fmean(values), "interval": spread}
    return differences


def table(document: Mapping[str, Any]) -> str:
    conclusions, seeds = document["conclusions"], seeds_of(document["arms"])
    parts = [
        f"medians of {seeds} seed(s), {document['steps']} steps, "
        f"{document['problems']} problems at the last score"
    ]
    stale = document["stale"]
    for kind, head in ((BOUND, "η"), (CORRECTION, f"at η = {stale}")):
        groups = group(document["arms"], kind)
        for columns, further in TABLES if groups else ():
            known = {title: conclusions[key] for title, key in further.items()}
            beside = {title: values for title, values in known.items() if kind == BOUND and values}
            text = medians_table(head, groups, columns, seeds=seeds, beside=beside)
            parts.append(f"{text}\n")
    for kind, what in ((BOUND, "η = "), (CORRECTION, f"η = {stale}, ")):
        for name, difference in conclusions["score_difference"][kind].items():
            ends = difference["interval"]
            shown = f", 95 % in [{ends[0]:+.3f}, {ends[1]:+.3f}]" if ends else ""
            parts.append(
                f"held-out score, {what}{name} less η = 0: {difference['mean']:+.3f}{shown}"
            )
    parts += failures(document["arms"])
    if not any(run["name"] == SYNCHRONOUS for run in document["arms"]):
        parts.append("scores are not compared with η = 0, which was not among the bounds")
    parts.append(
        f"predicted from the runs with η = {document['reference']}, so that itself fits best; "
        f"target {document['target']:g}"
    )
    return "\n".join([*parts, conditions(document)])


def draw(document: Mapping[str, Any], folder: Path) -> None:
    save_picture(picture(document), folder / "staleness")


def picture(document: Mapping[str, Any]) -> Any:
    """Return a figure of throughput over η and over measured off-policyness, lag, and scores.

    Panels that would hold nothing are left out: those of a measure that no bound changes or that
    a run lacks, and that of the corrections where none was run.
    """
    runs, stale = document["arms"], document["stale"]
    bounds, corrections = group(runs, BOUND), group(runs, CORRECTION)
    predictions = group([{**row, "kind": BOUND} for row in document["predictions"]], BOUND)
    panels: list[Callable[[Any], None]] = []
    if bounds:
        panels += [
            partial(_speed, bounds=bounds, predictions=predictions),
            *(partial(plot_tradeoff, runs=bounds, measure=shown) for shown in tradeoffs(bounds)),
        ]
        if any(run["lag_max"] for same in bounds.values() for run in same):
            panels.append(partial(_lag, bounds=bounds, predictions=predictions))
        panels.append(partial(_scores, bounds=bounds))
    if corrections:
        panels.append(partial(_corrections, bounds=bounds, corrections=corrections, stale=stale))
    columns = min(len(panels), 4 if len(panels) > 6 else 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(5.2 * columns, 4.2 * rows)
    for number, draw_panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, number))
    if seeds_of(runs) > 1:
        figure.suptitle(f"means over seeds; bands and bars: {INTERVAL}", fontsize=9)
    return figure


def _speed(axes: Any, bounds: Groups, predictions: Groups) -> None:
    plot_by_bound(axes, bounds, bounds, "samples_per_second", "measured")
    if predictions:
        plot_by_bound(axes, bounds, predictions, "simulated", "predicted by simulation", "--")
    axes.set(title="Throughput by η", ylabel="samples trained per second", ylim=(0, None))
    axes.legend(fontsize=8)


def _lag(axes: Any, bounds: Groups, predictions: Groups) -> None:
    plot_by_bound(axes, bounds, bounds, "lag_mean", "mean lag of trained tokens")
    if predictions:
        plot_by_bound(axes, bounds, predictions, "lag_mean", "mean, predicted by simulation", "--")
    plot_by_bound(axes, bounds, bounds, "lag_max", "largest", "v:")
    axes.set(title="Lag by η", ylabel="versions", ylim=(0, None))
    axes.legend(fontsize=8)


def _scores(axes: Any, bounds: Groups) -> None:
    plot_scores(axes, bounds, "η = {}")
    axes.set_title("Held-out score by η")


def _corrections(axes: Any, bounds: Groups, corrections: Groups, stale: int) -> None:
    synchronous: Mapping[str, Sequence[Run]] = {
        name: runs for name, runs in bounds.items() if name == SYNCHRONOUS
    }
    plot_scores(axes, synchronous, "η = {}")
    plot_scores(axes, corrections, f"η = {stale}, {{}}")
    axes.set_title(f"Held-out score, as stale as η = {stale} allows")
