"""`headway plan`: reads its options, chooses the rates, and shows the prediction."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deploy.config.rules import hardly_trains
from deploy.config.run_config import RunConfig
from deploy.planner.calibration import Measured, read_rates
from deploy.planner.caveats import caveats, differences, refuse_another_model
from deploy.planner.rates import EngineRates, LearnerRates, Rates, UpdateRates, lognormal_lengths
from deploy.planner.simulator import simulate
from deploy.planner.throughput import (
    FIGURES,
    Prospect,
    best,
    most_actors,
    predict,
    setting_of_run,
    split_intervals,
)
from deploy.report.staleness_window import LIMITS
from deploy.runtime.safe_console import print_whole
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError

NEEDED = ("tokens", "rollout_rate", "engine_rate", "train_rate")
"""Fields of `PlanInputs` that have to be given where no run is."""
COLUMNS = {
    "actors": ("actors", "{}"),
    "ranks": ("ranks", "{}"),
    "max_staleness": ("η", "{}"),
    "samples_per_second": ("samples/s", "{:.1f}"),
    "learner_idle": ("learner\nidle", "{:.0%}"),
    "actors_idle": ("actors\nidle", "{:.0%}"),
    "lag_mean": ("lag\nmean", "{:.2f}"),
    "lag_p50": ("\np50", "{}"),
    "lag_p95": ("\np95", "{}"),
    "lag_max": ("\nmax", "{}"),
    "ess": ("ESS", "{:.3f}"),
    "limit": ("limited by", "{}"),
}
"""Header and format by the key of a prospect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Rates from the command line; None where not given."""

    tokens: float | None
    tokens_variation: float
    rollout_rate: float | None
    engine_rate: float | None
    train_rate: float | None
    pause: float


def parse_bounds(text: str) -> list[int]:
    """Return bounds from a list such as "0,1,2", in order; raise InputError for any other text."""
    if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", text):
        raise InputError(f"--bounds {text!r}: give whole numbers up to 999, as 0,1,2")
    return sorted({int(number) for number in text.split(",")})


def plan(
    config: RunConfig,
    *,
    run: RunDirectory | None,
    given: PlanInputs,
    bounds: Sequence[int],
    devices: int | None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Predict a recipe, as a document that JSON can hold; `report` gets lines of progress.

    Rates are measured in `run`, or given where it is None; without `devices`, the recipe's count.
    Raises InputError if something is missing, contradicts itself, or cannot be simulated.
    """
    own = config.actors.count * config.actors.tensor_parallel_size + config.learner.ranks
    devices = own if devices is None else devices
    splits = most_actors(config, devices)
    rates, notes, itself = _rates(config, run, given, bounds)
    notes += hardly_trains(config)
    if 0 < config.learner.gpus < 1 or 0 < config.actors.gpus < 1:
        notes.append(
            "learner.gpus, actors.gpus: shares of a GPU count as devices of their own, each at "
            "its full rate; processes that share one are slower"
        )
    if config.queues.filter_tied and run is None:
        notes.append("queues.filter_tied: how many groups will be dropped is not known; none here")
    if config.queues.max_staleness == "auto":
        notes.append(
            'queues.max_staleness = "auto": every row is a bound set by hand; the run looks for '
            f"the smallest one up to {config.queues.bound} that is as good"
        )
    elif config.queues.ess_target is not None:
        notes.append("queues.ess_target: the window of staleness is taken as always at its widest")
    prospects = predict(config, rates, bounds=bounds, devices=devices, report=report)
    chosen = best(prospects)
    return {
        "recipe": config.name,
        "devices": devices,
        "splits": splits,
        "rates": {"of": str(run.path) if run else "command line", **rates.to_dict()},
        "itself": itself,
        "notes": notes,
        "prospects": [_row(prospect) for prospect in prospects],
        "best": _row(chosen),
        "intervals": split_intervals(config, rates, chosen, bounds),
    }


def show(document: dict[str, Any], console: Console) -> None:
    """Print the document of `plan` as tables and sentences."""
    itself, chosen = document["itself"], document["best"]
    title = f"{document['recipe']} on {document['devices']} devices, predicted"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for key, (head, _) in COLUMNS.items():
        table.add_column(head, justify="left" if key == "limit" else "right", no_wrap=True)
    for row in document["prospects"]:
        cells = [
            "–" if row[key] is None else form.format(row[key]) for key, (_, form) in COLUMNS.items()
        ]
        table.add_row(*cells, style="bold" if row == chosen else None)
    print_whole(console, table)
    if document["intervals"]:
        print_whole(console, _intervals(document["intervals"]))
    lines = []
    if itself is not None:
        measured, simulated = itself["measured"], itself["simulated"]
        lines.append(
            f"the run {itself['name']} itself: {measured['samples_per_second']:.1f} samples/s "
            f"measured, {simulated['samples_per_second']:.1f} simulated; mean lag "
            f"{measured['lag_mean']:.2f} and {simulated['lag_mean']:.2f}; its rates explain "
            f"{itself['explained']:.0%} of its rollouts' times"
        )
    tried, splits = len({row["actors"] for row in document["prospects"]}), document["splits"]
    if tried < splits:
        lines.append(f"{tried} of {splits} splits were tried, the best one's neighbours included")
    lines += [
        *(f"note: {note}" for note in document["notes"]),
        f"best: actors.count = {chosen['actors']}, learner.ranks = {chosen['ranks']}, "
        f"queues.max_staleness = {chosen['max_staleness']}: "
        f"{chosen['samples_per_second']:.1f} samples/s",
        f"limited by {LIMITS[chosen['limit']]}",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _intervals(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of medians and intervals, by bound."""
    [title] = {f"actors.count = {row['actors']}: median, and interval of 95 %" for row in rows}
    table = Table("η", title=title, box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for key in FIGURES:
        table.add_column(COLUMNS[key][0], justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{form.format(median)} ({form.format(low)}–{form.format(high)})"
            for form, (low, median, high) in ((COLUMNS[key][1], row[key]) for key in FIGURES)
        ]
        table.add_row(str(row["max_staleness"]), *cells)
    return table


def _rates(
    config: RunConfig, run: RunDirectory | None, given: PlanInputs, bounds: Sequence[int]
) -> tuple[Rates, list[str], dict[str, Any] | None]:
    """Return the rates, caveats about them, and a comparison of the measured run with itself."""
    if run is None:
        return _given_rates(config, given), [], None
    if names := [name for name in NEEDED if getattr(given, name) is not None]:
        raise InputError(f"--run measures what {_options(names)} would say; give one or the other")
    recorded = run.config()
    refuse_another_model(config, recorded)
    measured = read_rates(run)
    evaluated = recorded.heldout is not None and bool(run.summary().get("heldout", True))
    notes = caveats(measured, recorded, bounds=bounds, evaluated=evaluated)
    rates = replace(measured.rates, ranks=recorded.learner.ranks)
    return rates, [*differences(config, recorded), *notes], _compare(measured, recorded)


def _options(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _given_rates(config: RunConfig, given: PlanInputs) -> Rates:
    tokens, train = given.tokens, given.train_rate
    one, full = given.rollout_rate, given.engine_rate
    if tokens is None or one is None or full is None or train is None:
        missing = _options([name for name in NEEDED if getattr(given, name) is None])
        raise InputError(
            f"no rates: name a run to measure them of with --run, or give {missing} too"
        )
    if train <= 0:
        raise InputError(f"--train-rate {train} must be above 0")
    slots, size = config.actors.max_concurrent_rollouts, config.prompts.group_size
    return Rates(
        engine=EngineRates.of_throughput(one=one, full=full, slots=slots),
        learner=LearnerRates(token_seconds=1 / train),
        update=UpdateRates(pause_seconds=given.pause),
        lengths=lognormal_lengths(
            tokens, given.tokens_variation, group_size=size, seed=config.seed
        ),
    )


def _compare(measured: Measured, recorded: RunConfig) -> dict[str, Any] | None:
    """Compare a run with its own simulation; None where that cannot be simulated."""
    try:
        setting = setting_of_run(recorded, measured.batches)
        simulated = simulate(setting, measured.rates, seed=recorded.seed)
    except InputError:
        return None
    keys = ("samples_per_second", "learner_idle", "lag_mean")
    return {
        "name": recorded.name,
        "explained": measured.explained,
        "measured": {key: getattr(measured, key) for key in keys},
        "simulated": {key: getattr(simulated, key) for key in keys},
    }


def _row(prospect: Prospect) -> dict[str, Any]:
    row = asdict(prospect)
    return {**row.pop("outcome"), **row}
