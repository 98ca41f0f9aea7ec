"""The conclusions, tables and picture that `headway bench staleness` ends with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.harness.arms import show_conditions
from benchmarks.loop.staleness_figures import interval

Arm = Mapping[str, Any]
SYNCHRONOUS = "0"
UNBOUNDED = "inf"
SPEED = {
    "samples/s": ("samples_per_second", "{:.0f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "tokens/\nrollout": ("tokens_per_rollout", "{:.1f}"),
    "learner\nidle": ("learner_idle", "{:.0%}"),
    "actors\nidle": ("actors_idle", "{:.0%}"),
}
OFF_POLICYNESS = {
    "lag\nmean": ("lag_mean", "{:.2f}"),
    "p95": ("lag_p95", "{:.0f}"),
    "max": ("lag_max", "{:.0f}"),
    "ESS": ("ess", "{:.4f}"),
    "KL of\nmismatch": ("kl_fresh", "{:.1e}"),
    "KL,\nseveral": ("kl_crossed", "{:.1e}"),
    "KL,\nstale": ("kl_stale", "{:.1e}"),
    "clipped": ("clipped", "{:.1%}"),
}
"""KL by who sampled a rollout: the trained version itself, so that numerics alone differ; several
versions; an older one alone."""
LEARNING = {
    "score": ("score", "{:.3f}"),
    "seconds": ("seconds", "{:.0f}"),
    "seconds\nto target": ("seconds_to_target", "{:.0f}"),
}
TABLES = (SPEED, OFF_POLICYNESS, LEARNING)


def conclude(document: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from the arms; medians over seeds are of ratios within a seed.

    Returns:
        `of_predicted`: by bound, measured over simulated throughput. `of_unbounded`: by
        bound. `predicted_lag`: by bound, median of the simulated mean. `score_difference`: by bound
        and by correction, held-out score less that of η = 0 with the same seed: each, mean, and the
        95 % interval over seeds, None for a single one.
    """
    arms, predictions = document["arms"], document["predictions"]
    bounds = _group(arms, "bound")
    predicted = {(each["name"], each["seed"]): each for each in predictions}

    def ratio(of: Callable[[Arm], float | None]) -> dict[str, float]:
        found = {}
        for name, runs in bounds.items():
            values = [run["samples_per_second"] / other for run in runs if (other := of(run))]
            if values:
                found[name] = median(values)
        return found

    def of_simulated(key: str) -> Callable[[Arm], float | None]:
        return lambda run: predicted.get((run["name"], run["seed"]), {}).get(key)

    unbounded = {run["seed"]: run["samples_per_second"] for run in bounds.get(UNBOUNDED, [])}
    base = {run["seed"]: run["score"] for run in bounds.get(SYNCHRONOUS, [])}
    return {
        "of_predicted": ratio(of_simulated("simulated")),
        "of_unbounded": ratio(lambda run: unbounded.get(run["seed"])),
        "predicted_lag": {
            name: median(found)
            for name in bounds
            if (found := [each["lag_mean"] for each in predictions if each["name"] == name])
        },
        "score_difference": {
            kind: {
                name: _difference(found)
                for name, runs in _group(arms, kind).items()
                if name != SYNCHRONOUS
                and (
                    found := [
                        run["score"] - base[run["seed"]] for run in runs if run["seed"] in base
                    ]
                )
            }
            for kind in ("bound", "correction")
        },
    }


def show(document: Mapping[str, Any], console: Console) -> None:
    """Prints medians over seeds, and the conclusions."""
    conclusions = document["conclusions"]
    seeds = len({arm["seed"] for arm in document["arms"]})
    title = (
        f"medians of {seeds} seed(s), {document['steps']} steps, "
        f"{document['problems']} problems at the last score"
    )
    more = {
        "of pre-\ndicted": (SPEED, "of_predicted", "{:.2f}"),
        "of un-\nbounded": (SPEED, "of_unbounded", "{:.2f}"),
        "pre-\ndicted": (OFF_POLICYNESS, "predicted_lag", "{:.2f}"),
    }
    for kind, head in (("bound", "η"), ("correction", f"at η = {document['stale']}")):
        runs = _group(document["arms"], kind)
        for columns in TABLES if runs else ():
            table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
            table.add_column(head, no_wrap=True)
            beside = {
                column: (conclusions[key], form)
                for column, (where, key, form) in more.items()
                if kind == "bound" and where is columns and conclusions[key]
            }
            for column in [*columns, *beside]:
                table.add_column(column, justify="right")
            for name, arms in runs.items():
                cells = [_cell(arms, *column) for column in columns.values()]
                cells += [
                    form.format(found[name]) if name in found else "-"
                    for found, form in beside.values()
                ]
                fewer = f" ({len(arms)} seed(s))" if len(arms) < seeds else ""
                table.add_row(name + fewer, *cells)
            console.print(table)
    for kind, what in (("bound", "η"), ("correction", f"η = {document['stale']},")):
        for name, found in conclusions["score_difference"][kind].items():
            low_high = found["interval"]
            shown = f", 95 % in [{low_high[0]:+.3f}, {low_high[1]:+.3f}]" if low_high else ""
            equals = "= " if kind == "bound" else ""
            console.print(
                f"held-out score, {what} {equals}{name} less η = 0: {found['mean']:+.3f}{shown}"
            )
    if not any(arm["name"] == SYNCHRONOUS for arm in document["arms"]):
        console.print("no score stands beside that of η = 0, which was not among the bounds")
    console.print(
        f"predicted from the runs with η = {document['reference']}, so that itself fits best; "
        f"target {document['target']:g}"
    )
    show_conditions(document, console)


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Writes the picture."""
    picture(document).savefig(file, dpi=100)


def picture(document: Mapping[str, Any]) -> Any:
    """A figure of throughput and lag over their predictions, and of scores over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    speed, lag, by_bound, by_correction = figure.subplots(2, 2).flat
    bounds = _group(document["arms"], "bound")
    places = range(len(bounds))
    _points(speed, bounds, "samples_per_second", "measured, median")
    _points(lag, bounds, "lag_mean", "mean lag of trained tokens")
    for axes, key, label, style in (
        (speed, "simulated", "predicted by simulation", "--"),
        (lag, "lag_mean", "mean, predicted by simulation", "--"),
    ):
        lines = _group([{**each, "kind": key} for each in document["predictions"]], key)
        known = [(place, lines[name]) for place, name in enumerate(bounds) if name in lines]
        medians = [_median(each, key) for _, each in known]
        axes.plot([place for place, _ in known], medians, style, label=label)
    speed.set(title="Throughput", ylabel="samples trained per second", ylim=(0, None))
    lag.plot(places, [_median(runs, "lag_max") for runs in bounds.values()], "v:", label="largest")
    lag.set(title="Lag that the bound and the speeds make", ylabel="versions", ylim=(0, None))
    for axes in (speed, lag):
        axes.set_xticks(places, list(bounds))
        axes.set_xlabel("max_staleness η")
        axes.legend(fontsize=8)
    _curves(by_bound, bounds, "η = {}")
    by_bound.set_title("Held-out score, by bound")
    corrections = _group(document["arms"], "correction")
    synchronous = {name: runs for name, runs in bounds.items() if name == SYNCHRONOUS}
    _curves(by_correction, synchronous, "η = {}")
    _curves(by_correction, corrections, f"η = {document['stale']}, {{}}")
    by_correction.set_title(f"Held-out score, as stale as η = {document['stale']} lets")
    return figure


def _points(axes: Any, groups: Mapping[str, Sequence[Arm]], key: str, label: str) -> None:
    axes.plot(
        range(len(groups)), [_median(runs, key) for runs in groups.values()], "o-", label=label
    )
    for place, runs in enumerate(groups.values()):
        axes.plot([place] * len(runs), [run[key] for run in runs], ".", color="gray", alpha=0.6)


def _curves(axes: Any, groups: Mapping[str, Sequence[Arm]], label: str) -> None:
    """Mean over seeds of score and of the seconds that a version took, and each seed thinly."""
    for name, runs in groups.items():
        points = list(zip(*(run["curve"] for run in runs), strict=True))
        seconds = [fmean(second for second, _ in each) for each in points]
        scores = [fmean(score for _, score in each) for each in points]
        (mean,) = axes.plot(seconds, scores, ".-", label=label.format(name))
        for run in runs if len(runs) > 1 else ():
            axes.plot(*zip(*run["curve"], strict=True), color=mean.get_color(), lw=0.6, alpha=0.5)
    axes.set(xlabel="seconds of training", ylabel="greedy, held-out")
    axes.legend(fontsize=8)


def _group(arms: Sequence[Arm], kind: str) -> dict[str, list[Arm]]:
    """Arms of a kind by name, in the order of the first seed; bounds by size."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm["kind"] == kind:
            found.setdefault(arm["name"], []).append(arm)
    if kind != "bound":
        return found
    return dict(sorted(found.items(), key=lambda each: float(each[0])))


def _difference(each: Sequence[float]) -> dict[str, Any]:
    return {
        "each": list(each),
        "mean": fmean(each),
        "interval": interval(each) if len(each) > 1 else None,
    }


def _median(arms: Sequence[Arm], key: str) -> float:
    return median(arm[key] for arm in arms)


def _cell(arms: Sequence[Arm], key: str, form: str) -> str:
    values = [arm[key] for arm in arms if arm[key] is not None]
    return form.format(median(values)) if len(values) == len(arms) else "-"
