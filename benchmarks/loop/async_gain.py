"""Gain of asynchrony: samples/s at several η, beside the limit measured in the same run.

    headway bench async [RECIPE] [--bounds 0,1,2,4] [--steps N] [--rounds K] [--out DIR]

Each round trains the recipe at every bound, and at η = 0 with all cores for generation and training
in turn (not on GPUs). The limit is the smaller of actors alone, with the policy that η = 2 ends
with, whose consumer takes at once, and of the learner alone, which trains the recorded batches of
η = 2 again.

Without actors.cores and learner.cores in the recipe, the learner gets half of this machine's cores
and the engines share the others. The picture is drawn as PNG and SVG.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.comparison import (
    Comparison,
    RecipeOptions,
    check_inputs,
    in_turn,
    make_base,
)
from benchmarks.harness.cores import all_cores, on_gpus, shareable
from benchmarks.harness.record import Record
from benchmarks.harness.study import Study, cells, number, several, text_table
from benchmarks.harness.training_runs import BATCHES, WORKER, Arm, TrainingRuns, vary
from benchmarks.loop import run_figures
from benchmarks.loop.comparison_report import Groups, group, median_of
from benchmarks.loop.seed_intervals import estimate
from benchmarks.loop.staleness_pictures import (
    plot_estimates,
    plot_speed,
    plot_speed_by_lag,
)
from deploy.config.run_config import RunConfig
from deploy.report.plots import new_figure, save_picture
from deploy.report.summary import WARM_UP
from headway.cpu_cores import parse_cores
from learner.config.learner import ModelConfig
from queues.readers.checkpoints import newest_checkpoint

REFERENCE = 2
"""The bound whose run the limits are measured for; the largest one where it is not asked for."""
BOUND, ALL_CORES = "bound", "0, all cores"
COLUMNS = {
    "samples/s": ("samples_per_second", "{:.1f}"),
    "of limit": ("ratio_to_limit", "{:.2f}"),
    "learner idle": ("learner_idle", "{:.0%}"),
    "actors idle": ("actors_idle", "{:.0%}"),
    "lag mean": ("lag_mean", "{:.2f}"),
    "max": ("lag_max", "{:.0f}"),
    "ESS": ("ess", "{:.3f}"),
    "tokens/rollout": ("tokens_per_rollout", "{:.1f}"),
}


class AsyncOptions(RecipeOptions):
    """Options of `headway bench async`."""

    bounds: Annotated[Sequence[int], several(number(0), "Values of max_staleness.")] = (0, 1, 2, 4)
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of everything.")] = 3

    @property
    def reference(self) -> int:
        """The bound that the limits are measured for."""
        return REFERENCE if REFERENCE in self.bounds else max(self.bounds)


def plan(options: AsyncOptions) -> Comparison[AsyncOptions]:
    """Return the runs of every round; raises `InputError` where they cannot be measured."""
    base = make_base(options, "async", WARM_UP + 2).model_copy(update={"heldout": None})
    check_inputs(base)
    rounds = [round_arms(base, options, 1 + index) for index in range(options.rounds)]
    return Comparison(options=options, base=base, arms=rounds)


def round_arms(base: RunConfig, options: AsyncOptions, round_number: int) -> Sequence[Arm]:
    """Return the training runs of a round in their order."""

    def arm(kind: str, name: str, folder: str, eta: int, **changes: dict[str, Any]) -> Arm:
        config = vary(
            base,
            f"round{round_number}-eta{folder}",
            queues={"max_staleness": eta, "staleness_ceiling": None},
            **changes,
        )
        title = f"round {round_number}/{options.rounds} · η = {name}"
        return Arm(name=name, seed=round_number, kind=kind, title=title, config=config)

    arms = [arm(BOUND, str(bound), str(bound), bound) for bound in options.bounds]
    if not on_gpus(base):
        cores = all_cores(base)
        actors = {"cores": (cores,) * base.actors.count, "cpus": 0.0}
        shared = shareable(parse_cores(cores), base.learner.ranks)
        learner = {"cores": shared, "threads": None}
        arms.append(arm(ALL_CORES, ALL_CORES, "0-all-cores", 0, actors=actors, learner=learner))
    return in_turn(arms, round_number - 1)


def measure(plan: Comparison[AsyncOptions]) -> Iterator[Record]:
    runs = plan.start(2 * plan.options.rounds)  # two of each round measure limits
    facts = {"warm_up_steps_left_out": WARM_UP, "reference_bound": plan.options.reference}
    figures: list[Record] = []
    limits: list[Record] = []
    for arms in plan.arms:
        measured = [arm.tags() | run_figures.read_run(runs.run(arm)) for arm in arms]
        both = zip(arms, measured, strict=True)
        reference = next(pair for pair in both if pair[0].name == str(plan.options.reference))
        limits.append(measure_limits(plan, runs, *reference))
        for row in measured:
            limit = limits[-1]["samples_per_second"]
            figures.append({**row, "ratio_to_limit": row["samples_per_second"] / limit})
        yield {**plan.facts(), **facts, "arms": figures, "limits": limits}


def measure_limits(
    plan: Comparison[AsyncOptions], runs: TrainingRuns, reference: Arm, figures: Record
) -> Record:
    """Run actors alone with the reference's last policy, and the learner alone on its batches.

    Samples/s of actors are tokens/s over the mean length of the reference's rollouts.
    """
    number, recorded = reference.seed, reference.directory.path

    def alone(name: str, config: RunConfig, label: str, *worker: str | Path) -> list[Record]:
        title = f"round {number}/{len(plan.arms)} · {label}"
        config = config.model_copy(update={"name": f"round{number}-{name}"})
        arm = Arm(name=name, config=config, title=title, worker=(WORKER, *worker))
        return runs.run(arm).rows(BATCHES)

    checkpoint = newest_checkpoint(recorded)
    assert checkpoint is not None, "a finished run has a checkpoint"
    trained = plan.base.model_copy(update={"model": ModelConfig(path=str(checkpoint[1]))})
    actors = run_figures.speed(alone("actors", trained, "actors alone", "actors"))
    samples = actors["tokens_per_second"] / figures["tokens_per_rollout"]
    rows = alone("learner", reference.config, "learner on a full queue", "learner", recorded)
    learner = run_figures.training(rows, actors_idle=1.0)
    return {
        "actors": {"samples_per_second": samples, "raw": actors},
        "learner": learner,
        "samples_per_second": min(samples, learner["samples_per_second"]),
    }


def conclude(record: Record) -> Record:
    limits = {
        name: median(limit[name]["samples_per_second"] for limit in record["limits"])
        for name in ("actors", "learner")
    }
    limits["samples_per_second"] = median(x["samples_per_second"] for x in record["limits"])
    medians = {
        name: {key: median_of(runs, key) for key, _ in COLUMNS.values()}
        for name, runs in {**by_bound(record), **group(record["arms"], ALL_CORES)}.items()
    }
    return {"medians": {"arms": medians, "limits": limits}}


def by_bound(record: Record) -> Groups:
    """Return the runs of each bound, the smallest first."""
    bounds = group(record["arms"], BOUND)
    return {name: bounds[name] for name in sorted(bounds, key=int)}


def table(record: Record) -> str:
    limits, rounds = record["medians"]["limits"], len(record["limits"])
    rows = [[name, *cells(row, COLUMNS)] for name, row in record["medians"]["arms"].items()]
    title = f"medians of {rounds} round(s), {record['steps']} steps"
    return (
        f"{text_table(['η', *COLUMNS], rows, title)}\n"
        f"limit {limits['samples_per_second']:.1f} samples/s: actors alone {limits['actors']:.1f}, "
        f"learner on a full queue {limits['learner']:.1f}\n"
        f"the first {record['warm_up_steps_left_out']} steps are left out everywhere; "
        f"load average at the start {record['machine']['load_average'][0]:.1f}"
    )


def draw(record: Record, folder: Path) -> None:
    limits, cells = record["medians"]["limits"], []
    for name, runs in by_bound(record).items():
        keys = ("samples_per_second", "lag_mean")
        cells.append({"bound": name, **{key: estimate(run[key] for run in runs) for key in keys}})
    figure = new_figure(10.4, 4.2)
    speed, by_lag = figure.subplots(1, 2)
    for runs in group(record["arms"], ALL_CORES).values():
        together = [estimate(run["samples_per_second"] for run in runs)]
        plot_estimates(speed, [0.0], together, label="synchronous, all cores in turn", fmt="s")
    speed.axhline(limits["actors"], color="tab:cyan", ls=":", label="actors alone")
    speed.axhline(limits["learner"], color="tab:purple", ls=":", label="learner on a full queue")
    plot_speed(speed, cells, "split devices")
    speed.legend()
    plot_speed_by_lag(by_lag, cells)
    save_picture(figure, folder / "async_gain")


STUDY = Study(
    name="async",
    options=AsyncOptions,
    plan=plan,
    in_folder=True,
    file="async_gain.json",
    measure=measure,
    conclude=conclude,
    table=table,
    figures=draw,
)
