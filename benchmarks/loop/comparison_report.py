"""Conclusions, tables and pictures of comparisons of training runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from mpmath import betainc

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.study import Columns, text_table
from benchmarks.harness.training_runs import conditions
from deploy.report.plots import new_figure

Run = Mapping[str, Any]
"""Figures of one run, with its name, seed and kind."""
Groups = Mapping[str, Sequence[Run]]
"""Runs by name: one for each seed or round."""
BOUND = "bound"
"""Kind of the runs whose name is a value of max_staleness."""
CORRECTION = "correction"
SYNCHRONOUS = "0"
UNBOUNDED = "inf"
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
    """Return Student's 95 % interval of the mean over seeds; None of a single one."""
    count = len(values)
    if count < 2:
        return None
    half = t_quantile(0.975, count - 1) * stdev(values) / sqrt(count)
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
    """Return a table of medians over seeds, a row for each name; with fewer runs, it says so.

    `beside` has further columns, by title and name; `head` stands above the names.
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
            name: [run["samples_per_second"] / known for run in arms if (known := reference(run))]
            for name, arms in bounds.items()
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
    values = {
        name: [r["score"] - synchronous[r["seed"]] for r in runs if r["seed"] in synchronous]
        for name, runs in groups.items()
        if name != SYNCHRONOUS
    }
    return {
        name: {"each": seeds, "mean": fmean(seeds), "interval": interval(seeds)}
        for name, seeds in values.items()
        if seeds
    }


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
    """Return a figure of throughput over η and over off-policyness, and of scores, where known."""
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
    return draw_panels(panels)


def plot_speed(axes: Any, runs: Groups, label: str, predictions: Groups | None = None) -> None:
    """Plot throughput by bound, evenly spaced, beside what was predicted of it."""
    positions = {name: float(index) for index, name in enumerate(runs)}

    def values(groups: Groups, key: str) -> dict[float, list[float]]:
        return {positions[name]: [row[key] for row in rows] for name, rows in groups.items()}

    plot_means(axes, values(runs, "samples_per_second"), label)
    if predictions:
        plot_means(axes, values(predictions, "simulated"), "predicted by simulation", "--")
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


class OffPolicyness(NamedTuple):
    """A measure of how far trained tokens were from the policy that trained them."""

    label: str
    of: Callable[[Run], float | None]
    """Returns the value for the figures of a run; None where they lack it."""


MEASURES = (
    OffPolicyness("mean lag of trained tokens, versions", lambda run: run["lag_mean"]),
    OffPolicyness("1 − effective sample size", lambda run: 1 - run["ess"]),
    OffPolicyness("KL to the policy that sampled, nats a token", lambda run: run.get("kl")),
)
BESIDE = (((5, -11), "left"), ((5, 5), "left"), ((-5, 5), "right"), ((-5, -11), "right"))
"""Offsets of the names of points that follow one another, in points, and their alignment."""
LEAST_SHOWN = 1e-6
"""A measure that is nowhere larger is the rounding of on-policy training."""


def plot_means(
    axes: Any, values: Mapping[float, Sequence[float]], label: str, style: str = "o-"
) -> None:
    """Plot means by position on the horizontal axis; each is a dot where one has several values."""
    positions = sorted(values)
    means = [fmean(values[position]) for position in positions]
    (line,) = axes.plot(positions, means, style, label=label)
    _dots(axes, [[(position, y) for y in values[position]] for position in positions], line)


def _dots(axes: Any, groups: Sequence[Sequence[tuple[float, float]]], line: Any) -> None:
    """Plot every point of groups in the colour of a line, unless each has only one."""
    if any(len(group) > 1 for group in groups):
        points = zip(*(point for group in groups for point in group), strict=True)
        axes.plot(*points, ".", color=line.get_color(), alpha=0.5, ms=4)


def tradeoffs(runs: Mapping[str, Sequence[Run]]) -> list[OffPolicyness]:
    """Return the measures that differ between bounds and that every run of each bound has."""
    shown = []
    for measure in MEASURES:
        values = [measure.of(run) for of_bound in runs.values() for run in of_bound]
        known = [value for value in values if value is not None]
        if len(runs) > 1 and len(known) == len(values) and max(known) > LEAST_SHOWN:
            shown.append(measure)
    return shown


def plot_tradeoff(axes: Any, runs: Mapping[str, Sequence[Run]], measure: OffPolicyness) -> None:
    """Plot throughput over a measure, with a point and its η for each bound, smallest first.

    Points are means; where a bound has several runs, each is a dot.
    """
    points = [
        [(measure.of(run) or 0.0, run["samples_per_second"]) for run in of_bound]
        for of_bound in runs.values()
    ]
    means = [(fmean(x for x, _ in pairs), fmean(y for _, y in pairs)) for pairs in points]
    (line,) = axes.plot(*zip(*means, strict=True), "o-", alpha=0.6)
    _dots(axes, points, line)
    for name, mean, (offset, side) in zip(runs, means, cycle(BESIDE)):
        shown = "no bound" if name == "inf" else f"η = {name}"
        axes.annotate(shown, mean, offset, textcoords="offset points", fontsize=8, ha=side)
    axes.margins(x=0.15, y=0.12)
    axes.set(
        title=f"Throughput by {measure.label.partition(',')[0]}",
        xlabel=measure.label,
        ylabel="samples trained per second",
        ylim=(0, None),
    )
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-2, 4))


def draw_panels(panels: Sequence[Callable[[Any], None]]) -> Any:
    """Return a figure of matplotlib with panels, at most three in a row."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(5.2 * columns, 4.2 * rows)
    for number, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(rows, columns, number))
    return figure


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as `path` with the suffixes .png and .svg."""
    figure.savefig(path.with_suffix(".png"), dpi=100)
    figure.savefig(path.with_suffix(".svg"))
