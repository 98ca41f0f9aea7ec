"""Gain of asynchrony: samples/s at several η, beside the limit measured in the same run.

    headway bench async [RECIPE] [--bounds 0,1,2,4] [--steps N] [--rounds K] [--out DIR]

Each round trains the recipe at every bound, and at η = 0 with all cores for generation and training
in turn (not on GPUs). The limit is the smaller of actors alone, whose consumer takes at once, and
of the learner alone, which trains the recorded batches of η = 2 again.

Without actors.cores and learner.cores in the recipe, the learner gets half of this machine's cores
and the engines share the others. The picture is drawn as PNG and SVG.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cores import all_cores, describe_devices, on_gpus, shareable
from benchmarks.harness.plots import plot_means, plot_tradeoff, save_picture, tradeoffs
from benchmarks.harness.study import (
    Options,
    Record,
    Study,
    cells,
    option,
    text_table,
    whole_numbers,
)
from benchmarks.harness.training_runs import (
    BATCHES,
    RECIPE,
    TrainingRuns,
    check_inputs,
    load_comparison,
    make_warm_start,
    start_from,
    vary,
)
from benchmarks.loop import run_figures
from deploy.config.run_config import RunConfig
from deploy.report.plots import new_figure
from deploy.report.report import read_record
from deploy.report.summary import WARM_UP
from deploy.report.timeline import Timeline, draw_timeline, height, read_timeline
from deploy.storage.run_directory import RunDirectory
from headway.cpu_cores import parse_cores
from headway.errors import InputError
from learner.config.learner import ModelConfig
from queues.readers.checkpoints import newest_checkpoint

REFERENCE = 2
"""The bound whose run the limits are measured for; the largest one where it is not asked for."""
ALL_CORES = "0, all cores"
WORKER = "benchmarks.loop.run_worker"
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


def check(options: Options) -> None:
    """Check the options and the recipe; sets `base`, `chosen` and `reference`.

    Raises:
        InputError: Something cannot be measured.
    """
    recipe = load_comparison(options)
    least = WARM_UP + 2
    steps = recipe.steps if options.steps is None else options.steps
    if steps < least:
        raise InputError(
            f"--steps {steps} must be at least {least}: the first {WARM_UP} are "
            "left out of every figure"
        )
    if options.rounds < 1:
        raise InputError(f"--rounds {options.rounds} must be at least 1")
    options.chosen = tuple(map(int, whole_numbers(options.bounds, "--bounds")))
    options.reference = REFERENCE if REFERENCE in options.chosen else max(options.chosen)
    options.base = start_from(recipe, options, "async", steps).model_copy(update={"heldout": None})
    check_inputs(options.base)


def variants(base: RunConfig, bounds: tuple[int, ...], number: int) -> dict[str, RunConfig]:
    """Return the training runs of a round in their order, by their names in the table."""
    runs = {
        str(bound): vary(base, f"round{number}-eta{bound}", queues={"max_staleness": bound})
        for bound in bounds
    }
    if not on_gpus(base):
        cores = all_cores(base)
        runs[ALL_CORES] = vary(
            base,
            f"round{number}-eta0-all-cores",
            queues={"max_staleness": 0},
            actors={"cores": (cores,) * base.actors.count, "cpus": 0.0},
            learner={
                "cores": shareable(parse_cores(cores), base.learner.ranks),
                "threads": None,
            },
        )
    return dict(reversed(runs.items())) if number % 2 == 0 else runs


def measure(options: Options) -> Iterator[Record]:
    base = options.base
    make_warm_start(options, base)
    yield {
        "recipe": options.recipe,
        "settings": options.settings,
        "steps": base.steps,
        "devices": describe_devices(base),
        "warm_up_steps_left_out": WARM_UP,
        "reference_bound": options.reference,
    }
    rounds: list[Record] = []
    total = options.rounds * (len(variants(base, options.chosen, 1)) + 3)
    runs = TrainingRuns(options.out, total)
    for number in range(1, options.rounds + 1):
        rounds.append(measure_round(options, runs, number))
        yield {"rounds": rounds}


def measure_round(options: Options, runs: TrainingRuns, number: int) -> Record:
    base, title = options.base, f"round {number}/{options.rounds}"
    figures, directories = {}, {}
    for name, config in variants(base, options.chosen, number).items():
        directories[name] = runs.run(f"{title} · η = {name}", config, WORKER, "train")
        figures[name] = read_run(directories[name])
    reference = str(options.reference)
    recorded = directories[reference].path
    checkpoint = newest_checkpoint(recorded)
    assert checkpoint is not None, "a finished run has a checkpoint"
    generated = {}
    policies = {"initial": str(base.model.path), "trained": str(checkpoint[1])}
    for policy, model in policies.items():
        config = vary(base, f"round{number}-actors-{policy}")
        config = config.model_copy(update={"model": ModelConfig(path=model)})
        label = f"{title} · actors alone, {policy} policy"
        rows = runs.run(label, config, WORKER, "actors").rows(BATCHES)
        generated[policy] = run_figures.generation(rows)
    config = vary(base, f"round{number}-learner", queues={"max_staleness": options.reference})
    label = f"{title} · learner on a full queue"
    replayed = runs.run(label, config, WORKER, "learner", recorded).rows(BATCHES)
    actors = run_figures.actors_limit(
        generated["initial"], generated["trained"], figures[reference]["tokens_per_rollout"]
    )
    limits = {
        "actors": {**actors, "raw": generated},
        "learner_samples_per_second": run_figures.samples_per_second(replayed),
        "learner": run_figures.training(replayed, actors_idle=1.0),
    }
    return run_figures.compare_with_limits(figures, limits)


def read_rows(directory: RunDirectory) -> list[Record]:
    """Return the recorded batches of a run, as `metrics.jsonl` has them."""
    return [batch.to_dict() for batch in read_record(directory).batches]


def read_run(directory: RunDirectory) -> Record:
    rows = read_rows(directory)
    return run_figures.training(
        rows, actors_idle=run_figures.actors_idle(directory, rows, len(rows))
    )


def conclude(record: Record) -> Record:
    return {"medians": run_figures.medians(record["rounds"])} if "rounds" in record else {}


def table(record: Record) -> str:
    medians, limits = record["medians"], record["medians"]["limits"]
    names = sorted(medians["arms"], key=lambda name: (int(name.split(",")[0]), not name.isdigit()))
    rows = [[name, *cells(medians["arms"][name], COLUMNS)] for name in names]
    title = f"medians of {len(record['rounds'])} round(s), {record['steps']} steps"
    return (
        f"{text_table(['η', *COLUMNS], rows, title)}\n"
        f"limit {limits['samples_per_second']:.1f} samples/s: actors alone {limits['actors']:.1f}, "
        f"learner on a full queue {limits['learner']:.1f}\n"
        f"the first {record['warm_up_steps_left_out']} steps are left out everywhere; "
        f"load average at the start {record['machine']['load_average'][0]:.1f}"
    )


def reference_timeline(record: Record, folder: Path) -> Timeline:
    """Return ten steps of the reference run of the last round."""
    directory = RunDirectory(
        folder / f"round{len(record['rounds'])}-eta{record['reference_bound']}"
    )
    return read_timeline(directory, read_record(directory))


def draw(record: Record, folder: Path) -> None:
    timeline = reference_timeline(record, folder)
    heights = [4.5, height(timeline)]
    arms: dict[str, list[Record]] = {}
    for one_round in record["rounds"]:
        for name, figures in one_round["arms"].items():
            arms.setdefault(name, []).append(figures)
    synchronous = arms.pop(ALL_CORES, [])
    shown = tradeoffs(arms)
    figure: Any = new_figure(max(12, 4.8 * (1 + len(shown))), sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    speed, *others = above.subplots(1, 1 + len(shown), squeeze=False).flat
    _draw_throughput(speed, record, arms, synchronous)
    for axes, off_policyness in zip(others, shown, strict=True):
        plot_tradeoff(axes, arms, off_policyness)
    steps = sum(span.kind == "step" for span in timeline.learner)
    draw_timeline(below, timeline, f"η = {record['reference_bound']}: {steps} steps")
    save_picture(figure, folder / "async_gain")


def _draw_throughput(
    axes: Any, record: Record, arms: Mapping[str, list[Record]], synchronous: list[Record]
) -> None:
    def speeds(rounds: list[Record]) -> list[float]:
        return [figures["samples_per_second"] for figures in rounds]

    by_bound = {float(name): speeds(rounds) for name, rounds in arms.items()}
    plot_means(axes, by_bound, "split devices")
    if synchronous:
        plot_means(axes, {0.0: speeds(synchronous)}, "synchronous, all cores in turn", "s")
    limits = record["medians"]["limits"]
    axes.axhline(limits["samples_per_second"], color="black", label="limit: the smaller of both")
    axes.axhline(limits["actors"], color="tab:cyan", ls=":", label="actors alone")
    axes.axhline(limits["learner"], color="tab:purple", ls=":", label="learner on a full queue")
    axes.set(
        title="What asynchrony gains",
        xlabel="max_staleness η (0 is synchronous)",
        ylabel="samples trained per second",
        ylim=(0, None),
        xticks=sorted({0, *map(int, arms)}),
    )
    axes.legend(fontsize=8)


STUDY = Study(
    name="async",
    about=__doc__,
    options=(
        *RECIPE,
        option("--bounds", "0,1,2,4", "values of max_staleness"),
        option("--rounds", 3, "repetitions of everything"),
    ),
    check=check,
    in_folder=True,
    folder=None,
    file="async_gain.json",
    measure=measure,
    conclude=conclude,
    table=table,
    figures=draw,
)
