"""The conclusions, tables and picture of `headway bench staleness`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.plots import plot_medians
from benchmarks.harness.study import text_table
from benchmarks.harness.training_runs import conditions
from benchmarks.loop.run_figures import interval
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
    picture(document).savefig(folder / "staleness.png", dpi=100)


def picture(document: Mapping[str, Any]) -> Any:
    """Return a figure of throughput and lag over their predictions, and of scores over time."""
    figure = new_figure(13, 9)
    speed, lag, by_bound, by_correction = figure.subplots(2, 2).flat
    bounds = group(document["arms"], "bound")
    predictions = group([{**run, "kind": "bound"} for run in document["predictions"]], "bound")
    positions = {name: float(index) for index, name in enumerate(bounds)}

    def plot(
        axes: Any, runs: Mapping[str, Sequence[Run]], key: str, label: str, style: str
    ) -> None:
        values = {positions[name]: [run[key] for run in same] for name, same in runs.items()}
        plot_medians(axes, values, label, style)

    plot(speed, bounds, "samples_per_second", "measured, median", "o-")
    plot(speed, predictions, "simulated", "predicted by simulation", "--")
    speed.set(title="Throughput", ylabel="samples trained per second", ylim=(0, None))
    plot(lag, bounds, "lag_mean", "mean lag of trained tokens", "o-")
    plot(lag, predictions, "lag_mean", "mean, predicted by simulation", "--")
    plot(lag, bounds, "lag_max", "largest", "v:")
    lag.set(title="Lag by bound", ylabel="versions", ylim=(0, None))
    for axes in (speed, lag):
        axes.set_xticks(list(positions.values()), list(bounds))
        axes.set_xlabel("max_staleness η")
        axes.legend(fontsize=8)
    _curves(by_bound, bounds, "η = {}")
    by_bound.set_title("Held-out score, by bound")
    synchronous = {name: runs for name, runs in bounds.items() if name == SYNCHRONOUS}
    _curves(by_correction, synchronous, "η = {}")
    corrections = group(document["arms"], "correction")
    _curves(by_correction, corrections, f"η = {document['stale']}, {{}}")
    by_correction.set_title(f"Held-out score, as stale as η = {document['stale']} allows")
    return figure


def _curves(axes: Any, groups: Mapping[str, Sequence[Run]], label: str) -> None:
    """Draw scores over the mean seconds of each checkpoint."""
    for name, runs in groups.items():
        points = zip(*(run["curve"] for run in runs), strict=True)
        values = {
            fmean(second for second, _ in version): [score for _, score in version]
            for version in points
        }
        plot_medians(axes, values, label.format(name), ".-")
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
