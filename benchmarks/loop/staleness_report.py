"""The conclusions, tables and picture of `headway bench staleness`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.intervals import interval
from benchmarks.harness.plots import INTERVAL, plot_means, plot_tradeoff, save_picture, tradeoffs
from benchmarks.harness.study import text_table
from benchmarks.harness.training_runs import conditions
from deploy.report.plots import new_figure

Run = Mapping[str, Any]
SYNCHRONOUS = "0"
UNBOUNDED = "inf"
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
BESIDE = {
    "of predicted": (SPEED, "of_predicted"),
    "of unbounded": (SPEED, "of_unbounded"),
    "predicted": (OFF_POLICYNESS, "predicted_lag"),
}
"""Columns of conclusions in the tables of the bounds."""


def conclude(document: Mapping[str, Any]) -> dict[str, Any]:
    """Draw conclusions from the runs; medians over seeds are of ratios within a seed.

    Returns:
        `of_predicted`: by bound, measured over simulated throughput. `of_unbounded`: by bound.
        `predicted_lag`: by bound, median of the simulated mean. `score_difference`: by bound and
        by correction, held-out score less that of η = 0 with the same seed: each, mean, and the
        95 % interval over seeds, None for a single one.
    """
    runs, predictions = document["arms"], document["predictions"]
    bounds = group(runs, "bound")
    simulated = {(each["name"], each["seed"]): each["simulated"] for each in predictions}
    unbounded = {run["seed"]: run["samples_per_second"] for run in bounds.get(UNBOUNDED, [])}
    synchronous = {run["seed"]: run["score"] for run in bounds.get(SYNCHRONOUS, [])}

    def ratio(reference: Callable[[Run], float | None]) -> dict[str, float]:
        ratios = {}
        for name, seeds in bounds.items():
            values = [
                run["samples_per_second"] / speed for run in seeds if (speed := reference(run))
            ]
            if values:
                ratios[name] = median(values)
        return ratios

    lags: dict[str, list[float]] = {}
    for each in predictions:
        lags.setdefault(each["name"], []).append(each["lag_mean"])
    return {
        "of_predicted": ratio(lambda run: simulated.get((run["name"], run["seed"]))),
        "of_unbounded": ratio(lambda run: unbounded.get(run["seed"])),
        "predicted_lag": {name: median(lags[name]) for name in bounds if name in lags},
        "score_difference": {
            kind: _differences(group(runs, kind), synchronous) for kind in ("bound", "correction")
        },
    }


def _differences(
    groups: Mapping[str, Sequence[Run]], synchronous: Mapping[int, float]
) -> dict[str, Any]:
    """Return the differences in score to the synchronous run of the same seed, by name."""
    differences = {}
    for name, runs in groups.items():
        values = [r["score"] - synchronous[r["seed"]] for r in runs if r["seed"] in synchronous]
        if values and name != SYNCHRONOUS:
            spread = interval(values) if len(values) > 1 else None
            differences[name] = {"each": values, "mean": fmean(values), "interval": spread}
    return differences


def table(document: Mapping[str, Any]) -> str:
    """Return medians over seeds as tables, and the conclusions."""
    conclusions = document["conclusions"]
    seeds = len({run["seed"] for run in document["arms"]})
    parts = [
        f"medians of {seeds} seed(s), {document['steps']} steps, "
        f"{document['problems']} problems at the last score"
    ]
    for kind, head in (("bound", "η"), ("correction", f"at η = {document['stale']}")):
        runs = group(document["arms"], kind)
        for columns in (SPEED, OFF_POLICYNESS, LEARNING) if runs else ():
            beside = {
                title: conclusions[key]
                for title, (where, key) in BESIDE.items()
                if kind == "bound" and where is columns and conclusions[key]
            }
            rows = [
                [
                    name + (f" ({len(same)} seed(s))" if len(same) < seeds else ""),
                    *(_cell(same, *column) for column in columns.values()),
                    *(f"{known[name]:.2f}" if name in known else "-" for known in beside.values()),
                ]
                for name, same in runs.items()
            ]
            parts.append(text_table([head, *columns, *beside], rows) + "\n")
    for kind, what in (("bound", "η = "), ("correction", f"η = {document['stale']}, ")):
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
    bounds = group(document["arms"], "bound")
    corrections = group(document["arms"], "correction")
    panels: list[Callable[[Any], None]] = []
    if bounds:
        predictions = group([{**run, "kind": "bound"} for run in document["predictions"]], "bound")
        panels += [
            partial(_speed, bounds=bounds, predictions=predictions),
            *(partial(plot_tradeoff, runs=bounds, measure=each) for each in tradeoffs(bounds)),
        ]
        if any(run["lag_max"] for runs in bounds.values() for run in runs):
            panels.append(partial(_lag, bounds=bounds, predictions=predictions))
        panels.append(partial(_scores, bounds=bounds))
    if corrections:
        panels.append(
            partial(_corrections, bounds=bounds, corrections=corrections, stale=document["stale"])
        )
    columns = min(len(panels), 4 if len(panels) > 6 else 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(5.2 * columns, 4.2 * rows)
    for number, draw_panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, number))
    if len({run["seed"] for run in document["arms"]}) > 1:
        figure.suptitle(f"means over seeds; bands and bars: {INTERVAL}", fontsize=9)
    return figure


Groups = Mapping[str, Sequence[Run]]


def _speed(axes: Any, bounds: Groups, predictions: Groups) -> None:
    _by_bound(axes, bounds, bounds, "samples_per_second", "measured", "o-")
    if predictions:
        _by_bound(axes, bounds, predictions, "simulated", "predicted by simulation", "--")
    axes.set(title="Throughput by η", ylabel="samples trained per second", ylim=(0, None))
    axes.legend(fontsize=8)


def _lag(axes: Any, bounds: Groups, predictions: Groups) -> None:
    _by_bound(axes, bounds, bounds, "lag_mean", "mean lag of trained tokens", "o-")
    if predictions:
        _by_bound(axes, bounds, predictions, "lag_mean", "mean, predicted by simulation", "--")
    _by_bound(axes, bounds, bounds, "lag_max", "largest", "v:")
    axes.set(title="Lag by η", ylabel="versions", ylim=(0, None))
    axes.legend(fontsize=8)


def _by_bound(axes: Any, bounds: Groups, runs: Groups, key: str, label: str, style: str) -> None:
    """Plot a figure of runs by bound; bounds are evenly spaced."""
    positions = {name: float(index) for index, name in enumerate(bounds)}
    values = {positions[name]: [run[key] for run in same] for name, same in runs.items()}
    plot_means(axes, values, label, style)
    axes.set_xticks(list(positions.values()), list(bounds))
    axes.set_xlabel("max_staleness η")


def _scores(axes: Any, bounds: Groups) -> None:
    _curves(axes, bounds, "η = {}")
    axes.set_title("Held-out score by η")


def _corrections(axes: Any, bounds: Groups, corrections: Groups, stale: int) -> None:
    synchronous = {name: runs for name, runs in bounds.items() if name == SYNCHRONOUS}
    _curves(axes, synchronous, "η = {}")
    _curves(axes, corrections, f"η = {stale}, {{}}")
    axes.set_title(f"Held-out score, as stale as η = {stale} allows")


def _curves(axes: Any, groups: Mapping[str, Sequence[Run]], label: str) -> None:
    """Draw scores over the mean seconds of each checkpoint."""
    for name, runs in groups.items():
        points = zip(*(run["curve"] for run in runs), strict=True)
        values = {
            fmean(second for second, _ in version): [score for _, score in version]
            for version in points
        }
        plot_means(axes, values, label.format(name), ".-")
    axes.set(xlabel="seconds of training", ylabel="greedy, held-out")
    axes.legend(fontsize=8)


def group(runs: Sequence[Run], kind: str) -> dict[str, list[Run]]:
    """Return the runs of a kind by name, in the order of the first seed; bounds by size."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run["kind"] == kind:
            groups.setdefault(run["name"], []).append(run)
    if kind != "bound":
        return groups
    return dict(sorted(groups.items(), key=lambda item: float(item[0])))


def _cell(runs: Sequence[Run], key: str, form: str) -> str:
    values = [run[key] for run in runs if run[key] is not None]
    return form.format(median(values)) if len(values) == len(runs) else "-"
