"""What asynchrony gains: samples/s at several η, beside the limit measured in the same run.

    headway bench async [RECIPE] [--bounds 0,1,2,4] [--steps N] [--rounds K] [--out DIR]

Each round trains the recipe, without its held-out evaluation, at every bound with the recipe's
cores, and at η = 0 with all of them for generation and for training in turn. Then it measures

    actors alone               the same engines on the same cores, for a consumer that takes and
                               acknowledges at once: with the initial policy and with the last
                               checkpoint of the reference arm (η = 2)
    learner on a full queue    the real learner on its cores, training the reference arm's recorded
                               batches again, publishing and checkpoints included

The limit is the smaller of the two. Rounds go through the arms forwards and backwards in turn. All
figures leave out the first steps (`deploy.report.summary.WARM_UP`). Every arm is a process of its
own.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.arms import (
    all_cores,
    end_well,
    folder_of,
    initial_model,
    make_start,
    numbers,
    variant,
)
from benchmarks.harness.provenance import environment
from benchmarks.harness.subprocesses import Children
from benchmarks.loop import async_figures, async_outcome
from deploy.config.loader import load_recipe
from deploy.config.run_config import ModelConfig, RunConfig
from deploy.errors import InputError
from deploy.report.report import read_record
from deploy.report.summary import WARM_UP
from deploy.report.timeline import Timeline, idle_share, read_timeline, running_rollouts
from deploy.storage.run_directory import RunDirectory
from queues.readers.accounting import newest_checkpoint
from queues.readers.group_history import read_history

REFERENCE = 2
"""The bound whose run the limits are measured for; the largest one where it is not among them."""
BOTH = "0, all cores"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command was asked for."""

    base: RunConfig
    """The recipe, with a model folder instead of a warm start and without evaluations."""
    bounds: tuple[int, ...]
    rounds: int
    out: Path

    @property
    def reference(self) -> int:
        """The bound whose run is replayed."""
        return REFERENCE if REFERENCE in self.bounds else max(self.bounds)

    def recipe(self, name: str, **changes: Any) -> RunConfig:
        """The recipe of one arm; `changes` by section."""
        return variant(self.base, name, **changes)

    def arms(self, round_: int) -> dict[str, RunConfig]:
        """The training runs of a round in their order, by the name that the table gives them."""
        arms = {
            str(bound): self.recipe(f"round{round_}-eta{bound}", queues={"max_staleness": bound})
            for bound in self.bounds
        }
        cores = all_cores(self.base)
        arms[BOTH] = self.recipe(
            f"round{round_}-eta0-all-cores",
            queues={"max_staleness": 0},
            actors={"cores": (cores,) * self.base.actors.count, "cpus": 0.0},
            learner={"cores": cores, "threads": None},
        )
        return dict(reversed(arms.items())) if round_ % 2 == 0 else arms


def measure_round(plan: Plan, children: Children, round_: int) -> dict[str, Any]:
    """All arms and limits of one round."""
    title = f"round {round_}/{plan.rounds}"
    arms, directories = {}, {}
    for name, config in plan.arms(round_).items():
        directory = children.run(f"{title} · η = {name}", "train", config)
        arms[name], directories[name] = read_arm(directory), directory
    recorded = directories[str(plan.reference)]
    checkpoint = newest_checkpoint(recorded.path)
    assert checkpoint is not None, "a finished run has a checkpoint"
    generated = {}
    for which, model in (
        ("initial", str(plan.base.model.path)),
        ("trained", str(checkpoint[1])),
    ):
        config = plan.recipe(f"round{round_}-actors-{which}").model_copy(
            update={"model": ModelConfig(path=model)}
        )
        label = f"{title} · actors alone, {which} policy"
        rows = read_record(children.run(label, "actors", config)).batches
        generated[which] = async_figures.generation(rows)
    config = plan.recipe(f"round{round_}-learner", queues={"max_staleness": plan.reference})
    label = f"{title} · learner on a full queue"
    replayed = read_record(children.run(label, "learner", config, recorded.path)).batches
    tokens = arms[str(plan.reference)]["tokens_per_rollout"]
    limits = {
        "actors": {
            **async_figures.actors_limit(generated["initial"], generated["trained"], tokens),
            "raw": generated,
        },
        "learner_samples_per_second": async_figures.samples_per_second(replayed),
        "learner": async_figures.arm(replayed, actors_idle=1.0),
    }
    return async_figures.conclude(arms, limits)


def read_arm(directory: RunDirectory) -> dict[str, Any]:
    """Figures of a finished training run."""
    rows = read_record(directory).batches
    begin, end = async_figures.window(rows)
    history = read_history(directory.path, 0, len(rows))
    curves = running_rollouts(history.groups).values()
    idle = fmean(idle_share(curve, begin, end) for curve in curves)
    return async_figures.arm(rows, actors_idle=idle)


def reference_timeline(plan: Plan) -> Timeline | None:
    """Ten steps of the reference arm of the last round."""
    directory = RunDirectory(plan.out / f"round{plan.rounds}-eta{plan.reference}")
    record = read_record(directory)
    return read_timeline(
        directory.path,
        record.batches,
        record.swaps,
        max_staleness=record.max_staleness,
        groups_per_batch=plan.base.prompts.groups_per_batch,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="headway bench async",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", default="demo", help="a TOML file or a shipped recipe")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--bounds", default="0,1,2,4", help="values of max_staleness")
    parser.add_argument("--steps", type=int, help="of every arm; the recipe's by default")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--out", type=Path, help="new folder; runs/bench-async-TIME by default")
    return parser.parse_args()


def make_plan(arguments: argparse.Namespace, console: Console) -> Plan:
    """Checks what was asked for, then makes the folder and the initial model.

    Raises:
        InputError: Something cannot be measured, or the folder exists.
    """
    recipe = load_recipe(arguments.recipe, arguments.settings)
    all_cores(recipe)
    least = WARM_UP + 2
    steps = recipe.steps if arguments.steps is None else arguments.steps
    if steps < least:
        raise InputError(
            f"--steps {steps} must be at least {least}: the first {WARM_UP} are "
            "left out of every figure"
        )
    if arguments.rounds < 1:
        raise InputError(f"--rounds {arguments.rounds} must be at least 1")
    bounds = tuple(map(int, numbers(arguments.bounds, "--bounds")))
    out = folder_of(arguments, recipe, "async")
    if out.exists():
        raise InputError(f"--out {out} exists; name a folder that does not")
    base = recipe.model_copy(
        update={
            "steps": steps,
            "model": ModelConfig(path=initial_model(recipe, out)),
            "sft": None,
            "heldout": None,
            "deploy": recipe.deploy.model_copy(update={"runs_dir": out}),
        }
    )
    make_start(arguments, base, console)
    return Plan(base, bounds, arguments.rounds, out)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Everything, from the command line to the files."""
    facts = environment()
    plan = make_plan(arguments, console)
    total = plan.rounds * (len(plan.bounds) + 1 + 3)
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    rounds = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        children = Children(plan.out, progress, total)
        for round_ in range(1, plan.rounds + 1):
            rounds.append(measure_round(plan, children, round_))
            document = {
                **facts,
                "recipe": arguments.recipe,
                "settings": arguments.settings,
                "steps": plan.base.steps,
                "warm_up_steps_left_out": WARM_UP,
                "reference_bound": plan.reference,
                "medians": async_figures.medians(rounds),
                "rounds": rounds,
            }
            (plan.out / "async_gain.json").write_text(json.dumps(document, indent=1) + "\n")
    async_outcome.show(document, console)
    async_outcome.draw(document, reference_timeline(plan), plan.out / "async_gain.png")
    console.print(f"{plan.out / 'async_gain.json'}\n{plan.out / 'async_gain.png'}")


if __name__ == "__main__":
    end_well(lambda console: run(parse(), console))
