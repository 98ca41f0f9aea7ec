"""Head to head with TRL's GRPOTrainer: the same model, task, batches, steps, cores and seeds.

    headway bench versus-trl [RECIPE] [--seeds 0,1,2] [--steps N] [--microbatch 128,32]
                             [--threads 1,2] [--out DIR]

Needs what `make test-trl` installs into `.trl`. Headway runs the recipe as it is. TRL has the same
loss, optimizer and schedule, all cores of the recipe for generation and for training in turn, and
each microbatch with each number of threads that were asked for, since which is best is not known
beforehand: for every figure the best one is compared, all are stored. It samples by transformers:
its colocated vLLM cannot take new weights on a CPU, where vLLM packs them. A third process on the
cores costs threads that wait for each other more than it costs others, so the machine must be
quiet.
Seeds go through the arms forwards and backwards in turn. Checkpoints of all are scored on the same
held-out problems by the same engine afterwards, outside all times, which begin with the first
batch. A folder of --out that exists is gone on with.
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.arms import Children, all_cores, end_well, finished, make_base, numbers, variant
from benchmarks.async_figures import WARM_UP, samples_per_second, tokens_per_rollout
from benchmarks.checkpoint_scores import SCORES, score_runs
from benchmarks.environment import environment
from benchmarks.staleness_figures import curve, seconds_to
from deploy.bench import ROOT
from deploy.config import RunConfig
from deploy.errors import InputError
from deploy.run_directory import RunDirectory

HEADWAY = "Headway"
TRL = ROOT / ".trl"


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of one side."""

    name: str
    """Headway, or how TRL is set."""
    seed: int
    config: RunConfig
    how: tuple[str, ...] = ()
    """Of TRL: its microbatch and its threads."""


def arms_of(
    base: RunConfig, seed: int, microbatches: Sequence[str], threads: Sequence[str]
) -> list[Arm]:
    """The arms of a seed."""
    seeded = base.model_copy(update={"seed": seed})
    found = [Arm(HEADWAY, seed, variant(seeded, f"headway-seed{seed}"))]
    for micro, count in product(microbatches, threads):
        name = f"TRL, microbatch {micro}, threads {count}"
        config = variant(seeded, f"trl-{micro}-{count}-seed{seed}")
        found.append(Arm(name, seed, config, (micro, count)))
    return found


def train(arm: Arm, children: Children) -> None:
    """Makes one arm, unless it is there."""
    directory = RunDirectory.of(arm.config)
    if finished(directory, arm.config):
        children.skip()
        return
    shutil.rmtree(directory.path, ignore_errors=True)
    label = f"seed {arm.seed} · {arm.name}"
    if not arm.how:
        children.run(label, "train", arm.config)
        return
    paths = [str(TRL), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    micro, threads = arm.how
    children.run_module(
        label,
        "benchmarks.trl_arm",
        arm.config,
        micro,
        environment={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads},
    )


def read_arm(arm: Arm, target: float) -> dict[str, Any]:
    """Figures of a finished and scored arm."""
    directory = RunDirectory.of(arm.config)
    rows = directory.rows("metrics.jsonl")
    scores = json.loads((directory.path / SCORES).read_text())
    line = curve(rows, {int(version): score for version, score in scores.items()})
    return {
        "name": arm.name,
        "seed": arm.seed,
        "samples_per_second": samples_per_second(rows),
        "tokens_per_rollout": tokens_per_rollout(rows),
        "seconds": line[-1][0],
        "score": line[-1][1],
        "seconds_to_target": seconds_to(line, target),
        "curve": line,
        "step_finished_at": [row["step_finished_at"] for row in rows],
    }


def conclude(arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, and ratios within a seed to the TRL arm that is best at the figure.

    Returns:
        `medians` by arm; `throughput` with `best`, the TRL arm with the most samples/s, and
        `ratio`, Headway's over its; `time` with `best`, the TRL arm that reached the target first,
        and `ratio`, Headway's seconds over its. None where none reached it with every seed.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for arm in arms:
        by_name.setdefault(arm["name"], []).append(arm)
    figures = ("samples_per_second", "tokens_per_rollout", "score", "seconds", "seconds_to_target")
    medians = {
        name: {
            key: None if any(run[key] is None for run in runs) else median(r[key] for r in runs)
            for key in figures
        }
        for name, runs in by_name.items()
    }

    def compare(key: str, best: str | None) -> dict[str, Any]:
        if best is None or medians[HEADWAY][key] is None:
            return {"best": best, "ratio": None}
        theirs = {run["seed"]: run[key] for run in by_name[best]}
        ratio = median(run[key] / theirs[run["seed"]] for run in by_name[HEADWAY])
        return {"best": best, "ratio": ratio}

    theirs = {name: found for name, found in medians.items() if name != HEADWAY}
    fastest = max(theirs, key=lambda name: theirs[name]["samples_per_second"])
    arrived = [name for name, found in theirs.items() if found["seconds_to_target"] is not None]
    first = min(arrived, key=lambda name: theirs[name]["seconds_to_target"], default=None)
    return {
        "medians": medians,
        "throughput": compare("samples_per_second", fastest),
        "time": compare("seconds_to_target", first),
    }


def show(document: Mapping[str, Any], console: Console) -> None:
    """A table and what follows."""
    seeds = len({arm["seed"] for arm in document["arms"]})
    table = Table(title=f"medians of {seeds} seed(s), {document['steps']} steps")
    table.add_column("")
    for head in ("samples/s", "tokens a rollout", "score at the end", f"s to {document['target']}"):
        table.add_column(head, justify="right")
    conclusions = document["conclusions"]
    for name, found in conclusions["medians"].items():
        reached = found["seconds_to_target"]
        table.add_row(
            name,
            f"{found['samples_per_second']:.1f}",
            f"{found['tokens_per_rollout']:.1f}",
            f"{found['score']:.3f}",
            "-" if reached is None else f"{reached:.0f}",
        )
    console.print(table)
    speed, time = conclusions["throughput"], conclusions["time"]
    console.print(f"{speed['ratio']:.2f} times the samples/s of {speed['best']}")
    if time["ratio"] is None:
        console.print("the target was not reached by Headway and one of TRL's arms with every seed")
    else:
        console.print(f"{time['ratio']:.2f} of the seconds of {time['best']} to the target")
    console.print(f"load average at the start {document['machine']['load_average'][0]:.1f}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="headway bench versus-trl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", default="demo", help="a TOML file or a shipped recipe")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2", help="of prompts and sampling")
    parser.add_argument("--steps", type=int, help="of every arm; the recipe's by default")
    parser.add_argument("--microbatch", default="128,32", help="TRL's, in rollouts")
    parser.add_argument("--threads", default="1,2", help="TRL's")
    parser.add_argument("--score-every", type=int, default=5, help="steps between scores")
    parser.add_argument("--problems", type=int, default=2000, help="of the last score")
    parser.add_argument("--target", type=float, default=0.85, help="held-out score to be reached")
    parser.add_argument("--out", type=Path, help="folder; runs/bench-versus-trl-TIME by default")
    return parser.parse_args()


def check_alike(base: RunConfig) -> None:
    """Refuses a recipe whose objective TRL is not given.

    Raises:
        InputError: Names the setting.
    """
    objective, learner = base.objective, base.learner
    alike: dict[str, tuple[object, object]] = {
        "actors.reward": (base.actors.reward, ("last_answer",)),
        "actors.environment": (base.actors.environment, "single_turn"),
        "learner.loss": (objective.loss, "cispo"),
        "learner.loss_options": (sorted(objective.loss_options), ["cap_high"]),
        "learner.advantage": (objective.advantage, "grpo"),
        "learner.correction": (objective.correction, "none"),
        "learner.aggregation": (objective.aggregation, "token_mean"),
        "learner.kl": (objective.kl, None),
        "learner.entropy": (objective.entropy, None),
        "learner.optimizer": (learner.optimizer, "adamw"),
        "learner.minibatches": (learner.minibatches, 1),
        "learner.epochs": (learner.epochs, 1),
        "learner.schedule.kind": (learner.schedule.kind, "constant"),
        "queues.filter_tied": (base.queues.filter_tied, False),
    }
    for key, (found, wanted) in alike.items():
        if found != wanted:
            raise InputError(f"{key} = {found!r}: TRL is only given {wanted!r} here")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Everything, from the command line to the files."""
    facts = environment()
    if not (TRL / "trl").exists():
        raise InputError(f"{TRL} has no TRL: install it with `make test-trl`")
    seeds = numbers(arguments.seeds, "--seeds")
    microbatches = numbers(arguments.microbatch, "--microbatch")
    threads = numbers(arguments.threads, "--threads")
    base = make_base(arguments, console, "versus-trl")
    samples = base.prompts.groups_per_batch * base.prompts.group_size
    for micro in map(int, microbatches):
        if micro < 1 or samples % micro:
            raise InputError(f"--microbatch {micro} does not divide a batch of {samples} rollouts")
    if (base.objective.loss, base.actors.reward) != ("cispo", ("last_answer",)):
        raise InputError(
            'TRL is given loss "cispo" and reward "last_answer"; the recipe has others'
        )
    cores = all_cores(base)
    out = base.deploy.runs_dir
    every = [arms_of(base, int(seed), microbatches, threads) for seed in seeds]
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        children = Children(out, progress, sum(map(len, every)))
        for place, arms in enumerate(every):
            for arm in arms if place % 2 == 0 else arms[::-1]:
                train(arm, children)
            score_runs(base, [RunDirectory.of(arm.config).path for arm in arms], console)
    found = [read_arm(arm, arguments.target) for arms in every for arm in arms]
    document = {
        **facts,
        "recipe": arguments.recipe,
        "settings": arguments.settings,
        "steps": base.steps,
        "problems": arguments.problems,
        "target": arguments.target,
        "warm_up_steps_left_out": WARM_UP,
        "cores": cores,
        "arms": found,
        "conclusions": conclude(found),
    }
    (out / "versus_trl.json").write_text(json.dumps(document, indent=1) + "\n")
    show(document, console)
    console.print(f"{out / 'versus_trl.json'}")


if __name__ == "__main__":
    end_well(lambda console: run(parse(), console))
