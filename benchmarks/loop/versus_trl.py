"""Head to head with TRL's GRPOTrainer: the same model, task, batches, steps, cores and seeds.

    headway bench versus-trl [RECIPE] [--seeds 0,1,2] [--steps N] [--microbatch 128,32]
                             [--threads 1,2] [--generation padded,continuous] [--out DIR]

Needs what `make trl` installs into `.trl`. Headway runs the recipe as it is. TRL has the same loss,
optimizer and schedule, all cores of the recipe for generation and for training in turn, and each
microbatch with each number of threads and each way to generate that were asked for, since which is
best is not known beforehand: for every figure the best one is compared, all are stored, and what
fails is named and left out. Every process of both sides is held to the recipe's cores, Ray's and
the broker's too. TRL samples by transformers, which pads a batch until its longest
rollout has ended, or lets the next ones in continuously: its colocated vLLM cannot take new weights
on a CPU, where vLLM packs them. A third process on the cores costs threads that wait for each other
more than it costs others, so the machine must be quiet. An arm of the demo takes Headway about one
minute on two cores, and TRL up to ten.
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

from actors.errors import InputError as CoresMissing
from benchmarks.harness.arms import (
    all_cores,
    commits,
    end_well,
    finished,
    make_base,
    make_start,
    numbers,
    show_conditions,
    variant,
)
from benchmarks.harness.checkpoint_scores import read_scores, score_runs
from benchmarks.harness.provenance import environment
from benchmarks.harness.subprocesses import Children, read_environment
from benchmarks.loop.async_figures import samples_per_second, tokens_per_rollout
from benchmarks.loop.staleness_figures import curve, seconds_around, seconds_to
from deploy.cli.bench import ROOT
from deploy.config.run_config import RunConfig
from deploy.errors import InputError, RunFailed
from deploy.report.summary import WARM_UP
from deploy.storage.run_directory import RunDirectory
from queues.runtime.cpu_affinity import bind_process, parse_cores

HEADWAY = "Headway"
TRL = ROOT / ".trl"
SETTINGS = "trl.json"
"""In a folder of TRL's: its settings and versions, as it had them."""
GENERATION = ("padded", "continuous")
STATED = ("prompts", "actors", "queues", "learner", "weight_sync")
"""Sections of Headway's recipe that are stored."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of one side."""

    name: str
    """Headway, or how TRL is set."""
    seed: int
    config: RunConfig
    how: tuple[str, ...] = ()
    """Of TRL: its microbatch, its threads, and how it generates."""


def arms_of(base: RunConfig, seed: int, settings: Sequence[tuple[str, str, str]]) -> list[Arm]:
    """The arms of a seed; `settings` as `Arm.how`."""
    seeded = base.model_copy(update={"seed": seed})
    found = [Arm(HEADWAY, seed, variant(seeded, f"headway-seed{seed}"))]
    for micro, threads, generation in settings:
        name = f"TRL, microbatch {micro}, threads {threads}, {generation}"
        config = variant(seeded, f"trl-{micro}-{threads}-{generation}-seed{seed}")
        found.append(Arm(name, seed, config, (micro, threads, generation)))
    return found


def train(arm: Arm, children: Children) -> str | None:
    """Makes one arm, unless it is there; returns why it failed, where it did."""
    directory = RunDirectory.of(arm.config)
    if finished(directory, arm.config):
        children.skip()
        return None
    shutil.rmtree(directory.path, ignore_errors=True)
    label = f"seed {arm.seed} · {arm.name}"
    try:
        if arm.how:
            train_trl(label, arm, children)
        else:
            children.run(label, "train", arm.config)
    except RunFailed as error:
        return str(error)
    return None


def train_trl(label: str, arm: Arm, children: Children) -> None:
    """Makes one arm of TRL's.

    Raises:
        RunFailed: It failed; names its log.
    """
    paths = [str(TRL), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    micro, threads, generation = arm.how
    children.run_module(
        label,
        "benchmarks.loop.trl_arm",
        arm.config,
        micro,
        generation,
        variables={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads},
    )


def read_arm(arm: Arm, target: float) -> dict[str, Any]:
    """Figures of a finished and scored arm."""
    directory = RunDirectory.of(arm.config)
    rows = directory.rows("metrics.jsonl")
    line = curve(rows, read_scores(directory.path))
    return {
        "name": arm.name,
        "seed": arm.seed,
        "environment": read_environment(directory.path.parent, arm.config),
        "trl": json.loads((directory.path / SETTINGS).read_text()) if arm.how else None,
        "samples_per_second": samples_per_second(rows),
        "tokens_per_rollout": tokens_per_rollout(rows),
        "seconds": line[-1][0],
        "score": line[-1][1],
        "seconds_to_target": seconds_to(line, target),
        "seconds_around_target": seconds_around(line, target),
        "curve": line,
        "step_finished_at": [row["step_finished_at"] for row in rows],
    }


def conclude(arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, and ratios within a seed to the TRL arm that is best at the figure.

    Returns:
        `medians` by arm; `throughput` with `best`, the TRL arm with the most samples/s, and
        `ratio`, Headway's over its; `time` with `best`, the TRL arm that reached the target first,
        and `ratio`, Headway's seconds over its. None where none reached it with every seed. An arm
        that failed with a seed is left out; without Headway's there are no ratios.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for arm in arms:
        by_name.setdefault(arm["name"], []).append(arm)
    seeds = len({arm["seed"] for arm in arms})
    by_name = {name: runs for name, runs in by_name.items() if len(runs) == seeds}
    figures = ("samples_per_second", "tokens_per_rollout", "score", "seconds", "seconds_to_target")
    medians = {
        name: {
            key: None if any(run[key] is None for run in runs) else median(r[key] for r in runs)
            for key in figures
        }
        for name, runs in by_name.items()
    }

    def compare(key: str, best: str | None) -> dict[str, Any]:
        if best is None or HEADWAY not in medians or medians[HEADWAY][key] is None:
            return {"best": best, "ratio": None}
        theirs = {run["seed"]: run[key] for run in by_name[best]}
        ratio = median(run[key] / theirs[run["seed"]] for run in by_name[HEADWAY])
        return {"best": best, "ratio": ratio}

    theirs = {name: found for name, found in medians.items() if name != HEADWAY}
    fastest = max(theirs, key=lambda name: theirs[name]["samples_per_second"], default=None)
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
    show_conditions(document, console)
    if speed["ratio"] is None:
        console.print("Headway, or every arm of TRL, failed with some seed: there is no ratio")
        return
    console.print(f"{speed['ratio']:.2f} times the samples/s of {speed['best']}")
    if time["ratio"] is None:
        console.print("the target was not reached by Headway and one of TRL's arms with every seed")
    else:
        console.print(f"{time['ratio']:.2f} of the seconds of {time['best']} to the target")


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
    parser.add_argument("--generation", default=",".join(GENERATION), help="TRL's ways to sample")
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
        "learner.batch.token_weights": (objective.aggregation, "token_mean"),
        "learner.kl": (objective.kl, None),
        "learner.entropy": (objective.entropy, None),
        "learner.optimizer": (learner.optimizer, "adamw"),
        "learner.minibatches": (learner.minibatches, 1),
        "learner.epochs": (learner.epochs, 1),
        "learner.schedule.kind": (learner.schedule.kind, "constant"),
        "queues.filter_tied": (base.queues.filter_tied, False),
        "learner.correction_options": (dict(objective.correction_options), {}),
        "learner.advantage_options": (dict(objective.advantage_options), {}),
        "learner.mask_truncated": (objective.mask_truncated, False),
        "learner.drop_tied": (objective.drop_tied, False),
        "learner.max_token_lag": (objective.max_token_lag, None),
        "learner.process_rewards": (objective.process_rewards, False),
        "learner.positive_nll": (objective.positive_nll, 0.0),
        "learner.critic": (learner.critic, None),
        "learner.dtype": (learner.dtype, "float32"),
        "actors.greedy_baseline": (base.actors.greedy_baseline, False),
        "actors.overlong": (base.actors.overlong, None),
        "actors.missing_eos_penalty": (base.actors.missing_eos_penalty, 0.0),
        "actors.top_p": (base.actors.top_p, 1.0),
        "actors.top_k": (base.actors.top_k, -1),
    }
    for key, (found, wanted) in alike.items():
        if found != wanted:
            raise InputError(f"{key} = {found!r}: TRL is only given {wanted!r} here")


def hold(cores: str) -> None:
    """Keeps this process, and every one that it starts, on some cores.

    Raises:
        InputError: This machine does not have them.
    """
    try:
        bind_process(parse_cores(cores), "actors.cores with learner.cores")
    except CoresMissing as error:
        raise InputError(str(error)) from None


def make_settings(arguments: argparse.Namespace, samples: int) -> list[tuple[str, str, str]]:
    """Every way in which TRL is set, as `Arm.how`.

    Raises:
        InputError: One of them cannot be.
    """
    microbatches = numbers(arguments.microbatch, "--microbatch")
    threads = numbers(arguments.threads, "--threads")
    generation = tuple(dict.fromkeys(arguments.generation.split(",")))
    for micro in map(int, microbatches):
        if micro < 1 or samples % micro:
            raise InputError(f"--microbatch {micro} does not divide a batch of {samples} rollouts")
    if "0" in threads:
        raise InputError(f"--threads {arguments.threads!r}: there must be at least 1")
    if unknown := set(generation) - set(GENERATION):
        raise InputError(
            f"--generation {arguments.generation!r}: there are {', '.join(GENERATION)}, and not "
            f"{', '.join(sorted(unknown))}"
        )
    return list(product(microbatches, threads, generation))


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Everything, from the command line to the files."""
    facts = environment()
    if not (TRL / "trl").exists():
        raise InputError(f"{TRL} has no TRL: install it with `make trl`")
    seeds = numbers(arguments.seeds, "--seeds")
    base = make_base(arguments, "versus-trl")
    check_alike(base)
    cores = all_cores(base)
    samples = base.prompts.groups_per_batch * base.prompts.group_size
    settings = make_settings(arguments, samples)
    out = base.deploy.runs_dir
    every = [arms_of(base, int(seed), settings) for seed in seeds]
    hold(cores)
    make_start(arguments, base, console)
    trained, failed = [], []
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        children = Children(out, progress, sum(map(len, every)))
        for place, arms in enumerate(every):
            for arm in arms if place % 2 == 0 else arms[::-1]:
                if why := train(arm, children):
                    console.print(why, markup=False)
                    failed.append({"name": arm.name, "seed": arm.seed, "why": why})
                else:
                    trained.append(arm)
            runs = [RunDirectory.of(arm.config).path for arm in arms if arm in trained]
            score_runs(base, runs, console)
    if not trained:
        raise RunFailed("no arm came to its end, for the reasons above")
    found = [read_arm(arm, arguments.target) for arm in trained]
    document = {
        **facts,
        "recipe": arguments.recipe,
        "settings": arguments.settings,
        "headway": base.model_dump(mode="json", include=set(STATED)),
        "steps": base.steps,
        "problems": arguments.problems,
        "target": arguments.target,
        "warm_up_steps_left_out": WARM_UP,
        "cores": cores,
        "commits_of_arms": commits(found),
        "arms": found,
        "failed": failed,
        "conclusions": conclude(found),
    }
    (out / "versus_trl.json").write_text(json.dumps(document, indent=1) + "\n")
    show(document, console)
    console.print(f"{out / 'versus_trl.json'}")


if __name__ == "__main__":
    end_well(lambda console: run(parse(), console))
