"""Conclusions, tables and pictures of comparisons of training runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from mpmath import betainc

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.plots import Run, plot_means, plot_tradeoff, save_picture, tradeoffs
from benchmarks.harness.tables import Columns, text_table
from benchmarks.harness.training_runs import conditions
from deploy.report.plots import new_figure

Groups = Mapping[str, Sequence[Run]]
"""Runs by name: one for each seed or round."""
BOUND = "bound"
"""Kind of the runs whose name is a value of max_staleness."""
CORRECTION = "correction"
SYNCHRONOUS = "0"
UNBOUNDED = "inf"
CONFIDENCE = 0.95
SPEED = {
    "samples/s": ("samples_per_second", "{:.1f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "tokens/rollout": ("tokens_per_rollout", "{:.1f}"),
    "learner idle": ("learner_idle", "{:.0%}"),
    "actors idle": ("actors_idle", "{:.0%}"),
}
OFF_POLICYNESS = {
    "lag mean": ("lag_mean", "{:.2f}"),
    "max": ("lag_max", "{:.0f}"),
    "ESS": ("ess", "{:.4f}"),
    "KL": ("kl", "{:.1e}"),
}
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
"""Columns of each table of `staleness`, and the conclusions beside them in that of the bounds."""


def group(runs: Sequence[Run], kind: str) -> dict[str, list[Run]]:
    """Return the runs of a kind by name, in the order of the first seed; bounds by size."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run["kind"] == kind:
            groups.setdefault(run["name"], []).append(run)
    if kind != BOUND:
        return groups
    return dict(sorted(groups.items(), key=lambda item: float(item[0])))


def median_of(runs: Sequence[Run], key: str) -> float | None:
    """Return the median of a figure over seeds; None where a run has none."""
    values = [run[key] for run in runs]
    return None if None in values else median(values)


def seeds_of(runs: Sequence[Run]) -> int:
    """Return the number of different seeds of runs."""
    return len({run["seed"] for run in runs})


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's interval of the mean; a seed is one observation, of which one has none."""
    count = len(values)
    if count < 2:
        return None
    half = t_quantile(0.5 + CONFIDENCE / 2, count - 1) * stdev(values) / sqrt(count)
    middle = fmean(values)
    return middle - half, middle + half


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's distribution, above the median (A&S 1964, 26.5.27)."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        x = freedom / (freedom + middle**2)
        above = betainc(freedom / 2, 0.5, 0, x, regularized=True) / 2
        low, high = (middle, high) if above > 1 - probability else (low, middle)
    return high


def medians_table(
    head: str,
    groups: Groups,
    columns: Columns,
    *,
    seeds: int,
    beside: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
) -> str:
    """Return a table of medians over seeds, a row for each name.

    Args:
        head: Title of the names.
        groups: The runs by name.
        columns: Columns of figures of the runs.
        seeds: Number of seeds; a name with fewer runs says so.
        beside: Further columns, by title and name.
        title: Line above the table.
    """
    beside = beside or {}
    rows = []
    for name, runs in groups.items():
        values = [(median_of(runs, key), form) for key, form in columns.values()]
        values += [(known.get(name), "{:.2f}") for known in beside.values()]
        fewer = f" ({len(runs)} seed(s))" if len(runs) < seeds else ""
        shown = ["–" if value is None else form.format(value) for value, form in values]
        rows.append([name + fewer, *shown])
    return text_table([head, *columns, *beside], rows, title)


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
            differences[name] = {
                "each": values,
                "mean": fmean(values),
                "interval": interval(values),
            }
    return differences


def table(document: Mapping[str, Any]) -> str:
    conclusions, seeds = document["conclusions"], seeds_of(document["arms"])
    parts = [
        f"medians of {seeds} seed(s), {document['steps']} steps, "
        f"{document['problems']} problems at the last score"
    ]
    at_stale = f"η = {document['stale']}"
    for kind, head in ((BOUND, "η"), (CORRECTION, f"at {at_stale}")):
        groups = group(document["arms"], kind)
        for columns, further in TABLES if groups else ():
            known = {title: conclusions[key] for title, key in further.items()}
            beside = {title: values for title, values in known.items() if kind == BOUND and values}
            text = medians_table(head, groups, columns, seeds=seeds, beside=beside)
            parts.append(f"{text}\n")
    for kind, what in ((BOUND, "η = "), (CORRECTION, f"{at_stale}, ")):
        for name, difference in conclusions["score_difference"][kind].items():
            ends = difference["interval"]
            shown = f", 95 % in [{ends[0]:+.3f}, {ends[1]:+.3f}]" if ends else ""
            parts.append(
                f"held-out score, {what}{name} less η = 0: {difference['mean']:+.3f}{shown}"
            )
    parts += failures(document["arms"])
    parts.append(
        f"predicted from the runs with η = {document['reference']}, so that itself fits best; "
        f"target {document['target']:g}"
    )
    return "\n".join([*parts, conditions(document)])


def draw(document: Mapping[str, Any], folder: Path) -> None:
    save_picture(picture(document), folder / "staleness")


def picture(document: Mapping[str, Any]) -> Any:
    """Return a figure of throughput over η and over measured off-policyness, and of scores.

    Panels that would hold nothing are left out: those of a measure that no bound changes or that
    a run lacks, and that of the corrections where none was run.
    """
    bounds, corrections = (group(document["arms"], kind) for kind in (BOUND, CORRECTION))
    predictions = group([{**row, "kind": BOUND} for row in document["predictions"]], BOUND)
    at_stale = f"η = {document['stale']}, {{}}"
    panels: list[Callable[[Any], None]] = []
    if bounds:
        panels += [
            partial(plot_speed, runs=bounds, label="measured", predictions=predictions),
            *(partial(plot_tradeoff, runs=bounds, measure=shown) for shown in tradeoffs(bounds)),
            partial(plot_scores, groups=bounds, label="η = {}"),
        ]
    if corrections:
        panels.append(partial(plot_scores, groups=corrections, label=at_stale))
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(5.2 * columns, 4.2 * rows)
    for number, draw_panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, number))
    return figure


def plot_speed(axes: Any, runs: Groups, label: str, predictions: Groups | None = None) -> None:
    """Plot throughput by bound, evenly spaced, beside what was predicted of it."""
    positions = {name: float(index) for index, name in enumerate(runs)}
    speeds = {positions[n]: [run["samples_per_second"] for run in same] for n, same in runs.items()}
    plot_means(axes, speeds, label)
    if predictions:
        known = {
            positions[name]: [row["simulated"] for row in rows]
            for name, rows in predictions.items()
        }
        plot_means(axes, known, "predicted by simulation", "--")
    axes.set_xticks(list(positions.values()), list(runs))
    axes.set(
        title="Throughput by η",
        xlabel="max_staleness η",
        ylabel="samples trained per second",
        ylim=(0, None),
    )
    axes.legend(fontsize=8)


def plot_scores(axes: Any, groups: Groups, label: str) -> None:
    """Plot held-out scores over the mean seconds of each checkpoint; `label` has {} for a name."""
    for name, runs in groups.items():
        points = zip(*(run["curve"] for run in runs), strict=True)
        values = {
            fmean(second for second, _ in version): [score for _, score in version]
            for version in points
        }
        plot_means(axes, values, label.format(name), ".-")
    axes.set(title="Held-out score", xlabel="seconds of training", ylabel="greedy, held-out")
    axes.legend(fontsize=8)
