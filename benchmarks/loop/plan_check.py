"""Measured throughput and lag beside those that `headway plan` predicts, by bound.

    headway bench plan [FOLDER]

FOLDER is that of `headway bench async` or `staleness`, by default the present one. In each of its
rounds, or with each of its seeds, every run is predicted with the rates measured in every run: its
own, which shows how faithful the model is, and the others, which is what a plan is for. Takes
seconds.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, text_table
from deploy.config.run_config import RunConfig
from deploy.planner.calibration import Measured, read_rates
from deploy.planner.rates import Rates
from deploy.planner.throughput import intervals, setting_of_run
from deploy.storage.run_directory import RunDirectory
from headway.errors import HeadwayError, InputError

RUN_NAME = re.compile(r"(?:(?P<round>round\d+)-)?eta(?P<eta>\d+)(?:-(?P<seed>seed\d+))?")


class PlanOptions(Options):
    """Options of `headway bench plan`."""

    folder: Annotated[Path, typer.Argument(help="Of async or staleness.")] = Path()


def plan(options: PlanOptions) -> PlanOptions:
    """Return the options; raises `InputError` where their folder has no runs."""
    if not find_runs(options.folder):
        raise InputError(
            f"{options.folder} has no runs round1-eta0 or eta0-seed0, …: name a folder of `bench "
            "async` or `bench staleness`"
        )
    return options


def find_runs(folder: Path) -> dict[str, dict[int, RunDirectory]]:
    """Return the runs of a comparison, of each round or seed, by bound."""
    rounds: dict[str, dict[int, RunDirectory]] = {}
    for path in sorted(path for path in folder.glob("*eta*") if path.is_dir()):
        if match := RUN_NAME.fullmatch(path.name):
            name, bound = match["round"] or match["seed"], int(match["eta"])
            rounds.setdefault(name, {})[bound] = RunDirectory(path)
    return rounds


def read(run: RunDirectory) -> Measured | None:
    """Return the rates of a run; None, with the reason printed, where it cannot be read."""
    try:
        return read_rates(run)
    except HeadwayError as error:
        print(f"{run.path.name} is left out: {error}", flush=True)
        return None


def measure(options: PlanOptions) -> Iterator[Record]:
    """Predict every run of every round with the rates of each; raises `InputError` without any."""
    checks = []
    for name, runs in find_runs(options.folder).items():
        rates_of = {bound: read(run) for bound, run in sorted(runs.items())}
        measured = {bound: rates for bound, rates in rates_of.items() if rates is not None}
        configs = {bound: runs[bound].config() for bound in measured}
        checks += [
            {"round": name, "rates_of": source, **compare(configs[bound], rates.rates, run)}
            for source, rates in measured.items()
            for bound, run in measured.items()
        ]
    if not checks:
        raise InputError(f"no run in {options.folder} can be read, for the reasons above")
    yield {"runs": {"folder": options.folder.name, "checks": checks}}


def compare(config: RunConfig, rates: Rates, measured: Measured) -> Record:
    """Return the measured figures of a run beside intervals that rates predict."""
    setting = setting_of_run(config, measured.batches)
    predicted = intervals(setting, rates, seed=config.seed)
    keys = ("samples_per_second", "learner_idle", "lag_mean")
    figures = {
        key: {"measured": getattr(measured, key), "predicted": middle, "low": low, "high": high}
        for key, (low, middle, high) in ((key, predicted[key]) for key in keys)
    }
    speed = figures["samples_per_second"]
    ratio = speed["measured"] / speed["predicted"]
    return {"max_staleness": config.queues.bound, "ratio": ratio, **figures}


def table(record: Record) -> str:
    head = ["run", "rates of η", "η", "samples/s", "predicted", "ratio", "mean lag", "predicted"]
    form = "{round};{rates_of};{max_staleness};{0[measured]:.2f};{0[predicted]:.2f} ({0[low]:.2f}–"
    form += "{0[high]:.2f});{ratio:.2f};{1[measured]:.2f};{1[predicted]:.2f} ({1[low]:.2f}–"
    form += "{1[high]:.2f})"
    rows = record["runs"]["checks"]
    return text_table(
        head,
        [form.format(x["samples_per_second"], x["lag_mean"], **x).split(";") for x in rows],
    )


STUDY = Study(
    name="plan",
    options=PlanOptions,
    plan=plan,
    file="plan_check.json",
    measure=measure,
    table=table,
)
