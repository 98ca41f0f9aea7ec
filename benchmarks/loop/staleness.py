"""Throughput against off-policyness: what each bound costs and gains, and what correction buys.

    headway bench staleness [RECIPE] [--bounds 0,1,2,4,8,16,inf] [--seeds 0,1,2] [--steps N]
                            [--corrections none,tis,cispo,decoupled_ppo] [--stale 8] [--out DIR]

Every arm is a real run of its own from the same warm start, with equal cores and steps, without
evaluations; afterwards its checkpoints are scored on held-out problems.

    bounds         the recipe at every bound, with as many groups live as it allows. How much of it
                   becomes lag the speeds of both sides decide
    corrections    at the bound of --stale, as stale as it lets: all groups that the bound allows
                   are live, and engines hold them all. The loss is exchanged, nothing else

Beside the throughput of the first stands the prediction of the simulation behind `headway plan`, by
rates measured in the run of one bound (η = 2, where there is one).
Figures are of the newest batches of a run that end before its last lease, a hundred at most; the
largest lag, the scores and their seconds are of the whole run. An arm that fails, or whose figures
cannot be read, is named and left out; the others go on. The demo's arms take three to six minutes
on two cores with 150 steps, and scoring one about a minute.

A folder of --out that exists is gone on with: arms that are finished and have the same recipe are
kept, so that a study may be interrupted, or grow by seeds and bounds.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.arms import (
    commits,
    end_well,
    finished,
    make_base,
    make_start,
    numbers,
    variant,
)
from benchmarks.harness.checkpoint_scores import read_scores, score_runs
from benchmarks.harness.provenance import environment
from benchmarks.harness.subprocesses import Children, read_environment
from benchmarks.loop import staleness_figures, staleness_outcome
from benchmarks.loop.async_figures import window
from benchmarks.loop.staleness_outcome import UNBOUNDED
from deploy.config.run_config import RunConfig
from deploy.errors import InputError, RunFailed
from deploy.planner.calibration import LEAST_BATCHES, read_rates
from deploy.planner.predict import Source, predict_own
from deploy.report.report import read_record
from deploy.report.summary import WARM_UP
from deploy.report.timeline import idle_share, running_rollouts
from deploy.storage.run_directory import RunDirectory
from queues.errors import QueuesError
from queues.readers.group_history import read_history

CORRECTIONS: Mapping[str, dict[str, Any]] = {
    "none": {"loss": "reinforce"},
    "tis": {"loss": "reinforce", "correction": "tis"},
    "cispo": {"loss": "cispo"},
    "decoupled_ppo": {"loss": "decoupled_ppo"},
}
"""Sections `[learner]` beside the recipe's; `none` trains stale tokens as if they were new."""
REFERENCE = 2
"""The bound whose runs the predictions are made from; the largest one where it is not asked for."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One run."""

    kind: str
    """bound or correction."""
    name: str
    """Its bound, or its correction."""
    seed: int
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Study:
    """What the command was asked for."""

    base: RunConfig
    bounds: tuple[str, ...]
    seeds: tuple[int, ...]
    corrections: tuple[str, ...]
    stale: int
    target: float
    out: Path

    @property
    def reference(self) -> str:
        """The bound whose runs predict."""
        return str(REFERENCE) if str(REFERENCE) in self.bounds else self.bounds[-1]

    def arms(self, seed: int) -> list[Arm]:
        """Of one seed; every other seed goes through them backwards."""
        base = self.base.model_copy(update={"seed": seed})
        found = []
        for bound in self.bounds:
            eta = steps_of(bound, base.steps)
            queues = {"max_staleness": eta, "window": live_groups(base, eta)}
            config = variant(base, f"eta{bound}-seed{seed}", queues=queues)
            found.append(Arm("bound", bound, seed, config))
        live = live_groups(base, self.stale)
        for name in self.corrections:
            objective: dict[str, Any] = {
                "loss": "reinforce",
                "loss_options": {},
                "correction": "none",
                "correction_options": {},
                **CORRECTIONS[name],
            }
            stale = {"max_staleness": self.stale, "window": live, "allow_uncorrected": True}
            slots = -(-live * base.prompts.group_size // base.actors.count)
            config = variant(
                base,
                f"{name}-eta{self.stale}-seed{seed}",
                queues=stale,
                learner=objective,
                actors={"max_concurrent_rollouts": slots},
            )
            found.append(Arm("correction", name, seed, config))
        return found if self.seeds.index(seed) % 2 == 0 else found[::-1]


def steps_of(bound: str, steps: int) -> int:
    """`max_staleness` of a bound; a run has no larger lag than its steps."""
    return steps if bound == UNBOUNDED else int(bound)


def live_groups(config: RunConfig, eta: int) -> int:
    """As many as a bound allows to be live: the window does not hold them back before it does."""
    return (eta + 1) * config.prompts.groups_per_batch


def train(study: Study, arm: Arm, children: Children) -> str | None:
    """Makes one arm, unless it is there; returns why it failed, where it did."""
    directory = RunDirectory(study.out / arm.config.name)
    if finished(directory, arm.config):
        children.skip()
        return None
    shutil.rmtree(directory.path, ignore_errors=True)
    try:
        children.run(f"seed {arm.seed} · {arm.config.name}", "train", arm.config)
    except RunFailed as error:
        return str(error)
    return None


def read_arm(study: Study, arm: Arm) -> dict[str, Any]:
    """Figures of a finished and scored arm."""
    directory = RunDirectory(study.out / arm.config.name)
    every = read_record(directory).batches
    measured = read_rates(directory)
    rows = [row for row in every if measured.first <= row["version"] <= measured.last]
    begin, end = window(rows)
    history = read_history(directory.path, rows[0]["version"], len(every))
    curves = running_rollouts(history.groups).values()
    line = staleness_figures.curve(every, read_scores(directory.path))
    tokens = sum(row["tokens_trained"] for row in rows[WARM_UP:])
    return {
        "kind": arm.kind,
        "name": arm.name,
        "seed": arm.seed,
        "environment": read_environment(study.out, arm.config),
        "first_version": rows[WARM_UP]["version"],
        "batches": len(rows) - WARM_UP,
        "samples_per_second": measured.samples_per_second,
        "tokens_per_second": tokens / (end - begin),
        "tokens_per_rollout": tokens / sum(row["rollouts_trained"] for row in rows[WARM_UP:]),
        "learner_idle": measured.learner_idle,
        "actors_idle": sum(idle_share(each, begin, end) for each in curves) / len(curves),
        **staleness_figures.off_policyness(rows),
        "lag_max": max(row["max_lag"] for row in every if row["tokens_trained"]),
        "score": line[-1][1],
        "seconds": line[-1][0],
        "seconds_to_target": staleness_figures.seconds_to(line, study.target),
        "seconds_around_target": staleness_figures.seconds_around(line, study.target),
        "curve": line,
    }


def measure(
    study: Study, arms: Sequence[Arm], children: Children, console: Console
) -> tuple[list[tuple[Arm, dict[str, Any]]], list[dict[str, Any]]]:
    """Trains, scores and reads the arms of a seed.

    Returns:
        Those that came to their end, each with its figures; and the others, each with why.
    """
    trained: list[Arm] = []
    read: list[tuple[Arm, dict[str, Any]]] = []
    failed: list[dict[str, Any]] = []

    def fail(arm: Arm, why: str) -> None:
        console.print(why, markup=False)
        failed.append({"kind": arm.kind, "name": arm.name, "seed": arm.seed, "why": why})

    for arm in arms:
        if why := train(study, arm, children):
            fail(arm, why)
        else:
            trained.append(arm)
    score_runs(study.base, [RunDirectory.of(arm.config).path for arm in trained], console)
    for arm in trained:
        try:
            read.append((arm, read_arm(study, arm)))
        except (InputError, QueuesError) as error:
            fail(arm, f"{arm.config.name} cannot be read: {error}")
    return read, failed


def predictions(study: Study, trained: Sequence[Arm]) -> list[dict[str, Any]]:
    """Throughput of every trained bound by the rates of the same seed's reference run.

    Raises:
        InputError: The recipe cannot be simulated, or a reference run was too short.
        QueuesError: The ledger or the journal of a reference run cannot be read.
    """
    bounds = [arm for arm in trained if arm.kind == "bound"]
    found = []
    for reference in (arm for arm in bounds if arm.name == study.reference):
        measured = read_rates(RunDirectory(study.out / reference.config.name))
        source = Source(
            rates=measured.rates, ranks=study.base.learner.ranks, ess_loss=measured.ess_loss
        )
        for arm in bounds:
            if arm.seed == reference.seed:
                prospect = predict_own(arm.config, source)
                found.append(
                    {
                        "name": arm.name,
                        "seed": arm.seed,
                        "simulated": prospect.samples_per_second,
                        "lag_mean": prospect.outcome.lag_mean,
                        "ess": prospect.ess,
                    }
                )
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="headway bench staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", default="demo", help="a TOML file or a shipped recipe")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--bounds", default="0,1,2,4,8,16,inf", help="of max_staleness")
    parser.add_argument("--seeds", default="0,1,2", help="of prompts and sampling")
    parser.add_argument("--corrections", default=",".join(CORRECTIONS), help="'' for none of them")
    parser.add_argument("--stale", type=int, default=8, help="bound that corrections are held at")
    parser.add_argument("--steps", type=int, help="of every arm; the recipe's by default")
    parser.add_argument("--score-every", type=int, default=25, help="steps between scores")
    parser.add_argument("--problems", type=int, default=2000, help="of the last score")
    parser.add_argument("--target", type=float, default=0.85, help="held-out score to be reached")
    parser.add_argument("--out", type=Path, help="folder; runs/bench-staleness-TIME by default")
    return parser.parse_args()


def make_study(arguments: argparse.Namespace) -> Study:
    """Checks what was asked for; writes nothing.

    Raises:
        InputError: Something cannot be measured.
    """
    bounds = numbers(arguments.bounds, "--bounds", or_else=UNBOUNDED)
    seeds = numbers(arguments.seeds, "--seeds")
    corrections = tuple(dict.fromkeys(filter(None, arguments.corrections.split(","))))
    if unknown := set(corrections) - set(CORRECTIONS):
        raise InputError(
            f"--corrections {arguments.corrections!r}: there are {', '.join(CORRECTIONS)}, and not "
            f"{', '.join(sorted(unknown))}"
        )
    if arguments.stale < 1:
        raise InputError(f"--stale {arguments.stale} must be at least 1")
    base = make_base(arguments, "staleness")
    unleased = 1 + (arguments.stale if corrections else 0)
    if base.steps < LEAST_BATCHES + unleased:
        raise InputError(
            f"--steps {base.steps} must be at least {LEAST_BATCHES + unleased}: figures need "
            f"{LEAST_BATCHES} batches, and the last {unleased} of an arm are trained when nothing "
            "is leased any more"
        )
    return Study(
        base,
        tuple(sorted(bounds, key=lambda bound: steps_of(bound, sys.maxsize))),
        tuple(map(int, seeds)),
        corrections,
        arguments.stale,
        arguments.target,
        base.deploy.runs_dir,
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Everything, from the command line to the files."""
    facts = environment()
    study = make_study(arguments)
    every = {seed: study.arms(seed) for seed in study.seeds}
    make_start(arguments, study.base, console)
    total = sum(map(len, every.values()))
    read: list[tuple[Arm, dict[str, Any]]] = []
    failed: list[dict[str, Any]] = []
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        children = Children(study.out, progress, total)
        for arms in every.values():
            of_seed, without = measure(study, arms, children, console)
            read += of_seed
            failed += without
    if not read:
        raise RunFailed("no arm came to its end, for the reasons above")
    figures = [found for _, found in read]
    document = {
        **facts,
        "recipe": arguments.recipe,
        "settings": arguments.settings,
        "steps": study.base.steps,
        "problems": arguments.problems,
        "target": study.target,
        "stale": study.stale,
        "reference": study.reference,
        "commits_of_arms": commits(figures),
        "arms": figures,
        "failed": failed,
        "predictions": [],
    }
    try:
        document["predictions"] = predictions(study, [arm for arm, _ in read])
    except (InputError, QueuesError) as error:
        console.print(f"nothing is predicted: {error}", markup=False)
    document["conclusions"] = staleness_outcome.conclude(document)
    (study.out / "staleness.json").write_text(json.dumps(document, indent=1) + "\n")
    staleness_outcome.show(document, console)
    staleness_outcome.draw(document, study.out / "staleness.png")
    console.print(f"{study.out / 'staleness.json'}\n{study.out / 'staleness.png'}")


if __name__ == "__main__":
    end_well(lambda console: run(parse(), console))
