"""Comparisons of training runs: arms of one recipe, at equal cores, from one initial model."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import typer
from pydantic import Field

from benchmarks.harness.checkpoint_scores import SCORES, learning, read_scores, score_runs
from benchmarks.harness.cores import check_devices, describe_devices, with_cores
from benchmarks.harness.processes import CLI, child, raise_failure, set_options
from benchmarks.harness.record import Record, timestamp
from benchmarks.harness.study import Options, number, several
from benchmarks.harness.training_runs import BATCHES, Arm, TrainingRuns, commits
from deploy.config.devices import for_this_machine
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.preflight.models import model_path, refuse_another_origin, warm_start_origin
from deploy.report.summary import WARM_UP
from deploy.storage.atomic_folder import ORIGIN_FILE
from headway.cpu_cores import usable_cores
from headway.errors import HeadwayError, InputError
from headway.user_code import CODE_DIR
from learner.config.learner import ModelConfig

Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe.")
]
ScoreEvery = Annotated[int, typer.Option(min=1, help="Steps between two scores.")]


class RecipeOptions(Options):
    """Options of a comparison: a recipe and its changes."""

    recipe: Annotated[str, typer.Argument(help="A TOML file or a shipped recipe.")] = "demo"
    settings: Settings = Field(default_factory=list)
    steps: Annotated[int | None, typer.Option(help="Of every run; else the recipe's.")] = None
    sampled: ClassVar[bool] = False
    """Scores are of samples at the recipe's temperature, and not greedy."""


class ScoredOptions(RecipeOptions):
    """Options of a comparison that scores checkpoints."""

    seeds: Annotated[Sequence[int], several(number(0), "Of prompts and sampling.")] = (0, 1, 2)
    problems: Annotated[int, typer.Option(min=1, help="Of the last score.")] = 2000
    target: Annotated[float | None, typer.Option(help="Held-out score whose time is taken.")] = 0.85
    score_every: ScoreEvery = 25


Chosen = TypeVar("Chosen", bound=RecipeOptions)
Scored = TypeVar("Scored", bound=ScoredOptions)


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[Chosen]):
    """The plan of a comparison: its recipe, and the arms of each seed or round in their order."""

    options: Chosen
    base: RunConfig
    arms: Sequence[Sequence[Arm]]
    stored: Sequence[Record] = ()
    """Figures that an earlier record of this comparison has of its arms."""

    @property
    def folder(self) -> Path:
        """The folder of the runs."""
        return self.base.deploy.runs_dir

    def facts(self) -> Record:
        """Return what stands in the record of every comparison."""
        facts = {"recipe": self.options.recipe, "settings": self.options.settings}
        return {**facts, "steps": self.base.steps, "devices": describe_devices(self.base)}

    def recipe_key(self, *cells: Any) -> str:
        """Return a checksum of the settings of all arms, and of the code beside the recipe.

        `cells` are settings in which arms differ; folders and seeds are left out.
        """
        recipe = load_recipe(self.options.recipe, self.options.settings)
        model = recipe.model_dump(mode="json", include={"model", "sft", "prefer"})
        shared = self.base.model_dump(mode="json", exclude={"name", "seed", "deploy", "model"})
        beside = Path(os.environ[CODE_DIR]).glob("*.py") if CODE_DIR in os.environ else ()
        code = {file.name: file.read_text() for file in beside}
        settings = json.dumps([model, shared, code, *cells], sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:12]

    def make_warm_start(self) -> None:
        """Make the warm start of the arms, unless it exists; raises as `make_model`."""
        options, model = self.options, Path(str(self.base.model.path))
        if model.is_relative_to(self.folder) and not model.exists():
            settings = [*options.settings, f"deploy.runs_dir={self.folder}"]
            make_model("sft", options.recipe, settings, self.folder)

    def score(self, arms: Sequence[Arm]) -> None:
        """Score the checkpoints of finished arms; raises as `score_runs`."""
        temperature = self.base.actors.temperature if self.options.sampled else 0.0
        score_runs(self.base, [arm.directory.path for arm in arms], temperature=temperature)

    def start(self, further: int = 0) -> TrainingRuns:
        """Make the initial model; return the runs, as many as arms and `further`."""
        self.make_warm_start()
        model, devices = self.base.model.path, describe_devices(self.base)
        print(f"every arm starts from {model}, {devices}", flush=True)
        return TrainingRuns(sum(map(len, self.arms)) + further)


def scored_plan(
    options: Scored, name: str, arms_of: Callable[[RunConfig], Sequence[Arm]]
) -> Comparison[Scored]:
    """Return a plan of the arms that `arms_of` returns for the recipe of each seed.

    Raises:
        InputError: The options or the recipe cannot be measured.
    """
    base = make_base(options, name, WARM_UP + 5)
    if base.heldout is None:
        raise InputError(f"recipe {options.recipe} has no [heldout] to score by")
    problems = options.problems or base.heldout.final_size or base.heldout.size
    base = base.updated(
        heldout={"size": min(problems, base.heldout.size), "final_size": problems},
        learner={"checkpoint_every": options.score_every, "keep_checkpoints": base.steps},
    )
    check_inputs(base)
    arms = [
        in_turn(arms_of(base.model_copy(update={"seed": seed})), position)
        for position, seed in enumerate(options.seeds)
    ]
    return Comparison(options=options, base=base, arms=arms)


def in_turn(arms: Sequence[Arm], position: int) -> Sequence[Arm]:
    """Return the arms of a seed or round, every other time in reverse order."""
    return arms if position % 2 == 0 else arms[::-1]


def make_base(options: RecipeOptions, name: str, least: int) -> RunConfig:
    """Return the recipe that all arms of a benchmark vary, with at least so many steps.

    Raises:
        InputError: The recipe is not valid, or its arms would not have equal devices.
    """
    recipe = for_this_machine(load_recipe(options.recipe, options.settings))
    recipe = with_cores(recipe, usable_cores())
    check_devices(recipe)
    steps = recipe.steps if options.steps is None else options.steps
    if steps < least:
        raise InputError(
            f"--steps {steps} must be at least {least}: the first {WARM_UP} are left out of every "
            "figure"
        )
    out = (options.out or recipe.deploy.runs_dir / f"bench-{name}-{timestamp()}").absolute()
    model = ModelConfig(path=initial_model(recipe, out))
    made = {"model": model, "sft": None, "prefer": None}
    changed = recipe.model_copy(update={"steps": steps, **made})
    return changed.updated(deploy={"runs_dir": out})


def check_inputs(base: RunConfig) -> None:
    """Check model, prompts and user code; only the code where a warm start is still to be made."""
    from deploy.preflight.inputs import check_code, load_inputs

    model = Path(str(base.model.path))
    if model.exists() or not model.is_relative_to(base.deploy.runs_dir):
        load_inputs(base)
    else:
        check_code(base)


def initial_model(recipe: RunConfig, out: Path) -> str:
    """Return the recipe's initial model, or the warm start that exists or will be made.

    Raises:
        InputError: There is no such model, or `out` has a warm start of other settings.
    """
    if recipe.sft is None or recipe.prefer is not None:
        return model_path(recipe)
    origin = warm_start_origin(recipe)
    for folder in (out, recipe.deploy.runs_dir):
        for file in sorted(folder.glob(f"*-sft/model/{ORIGIN_FILE}")):
            if file.read_text() == origin:
                return str(file.parent.absolute())
    warm_start = recipe.updated(deploy={"runs_dir": out}).warm_start
    if warm_start.exists():
        refuse_another_origin(warm_start, origin, "name another --out")
    return str(warm_start)


def make_model(command: str, recipe: str, settings: Sequence[str], folder: Path) -> None:
    """Run `headway sft` or `reward-model`, its log in the folder; raises as `raise_failure`."""
    log = folder / f"{command}.log"
    words = [sys.executable, *CLI, command, recipe, *set_options(settings)]
    with log.open("w") as errors, child(words, None, errors) as process:
        process.wait()
    raise_failure(f"headway {command}", process.returncode, log)


def measure_scored(plan: Comparison[Scored], read: Callable[[Arm], Record]) -> Iterator[Record]:
    """Train, score and read the arms of a comparison that are not stored, seed by seed.

    Yields:
        After each seed the facts, figures (`arms`) and failures (`failed`) of all so far. Figures
        of an arm are those of its scores and those that `read` returns.

    Raises:
        InputError: An arm refused its input.
        RunFailed: There are no figures of any arm; the first seed without any ends it.
    """
    options, heldout = plan.options, plan.base.heldout
    assert heldout is not None
    facts = plan.facts() | {"problems": heldout.final_size, "target": options.target}
    figures: list[Record] = [*plan.stored]
    failed: list[Record] = []

    def so_far() -> Record:
        return {**facts, "commits_of_arms": commits(figures), "arms": figures, "failed": failed}

    if figures:
        yield so_far()
    known = {(run["kind"], run["name"], run["seed"]) for run in figures}
    rest = [[arm for arm in arms if arm.key not in known] for arms in plan.arms]
    plan = replace(plan, arms=[arms for arms in rest if arms])
    if not plan.arms:
        return
    runs = plan.start()
    for arms in plan.arms:
        trained, untrained = runs.train(arms)
        failed += untrained
        if not trained and not figures:
            break
        plan.score(trained)
        for arm in trained:
            try:
                figures.append(scored_figures(arm, read(arm), options.target))
            except HeadwayError as error:
                failed.append(arm.failed(f"{arm.config.name} cannot be read: {error}"))
        if figures:
            yield so_far()
    if not figures:
        raise RunFailed("no arm came to its end, for the reasons above")


def scored_figures(arm: Arm, figures: Record, target: float | None) -> Record:
    """Return figures of a run with what tells it from others and with those of its scores.

    Raises RunFailed where it has no scores.
    """
    run = arm.directory
    if not (run.path / SCORES).exists():
        raise RunFailed("a checkpoint could not be scored: see scores.log")
    return {
        **arm.tags(),
        "environment": arm.environment(),
        **figures,
        **learning(run.rows(BATCHES), read_scores(run.path), target),
    }
