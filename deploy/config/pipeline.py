"""A pipeline: a TOML file of stages, each a command with a recipe, and what each depends on; pure.

A setting of a stage may be what an earlier one makes, as in `"model.path" = "{warm}"`. Stages with
the same recipe find what its sections make without that: all of it is named after the pipeline.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from deploy.config.devices import for_this_machine
from deploy.config.loader import load_recipe
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from headway.errors import InputError
from headway.nearest_name import nearest
from headway.options import parse_options
from headway.recipe_section import Section

SHIPPED = Path(__file__).parents[1] / "recipes" / "pipelines"
SECTIONS = ("sft", "prefer", "reward_model")
"""Sections of a recipe whose commands make a folder that later ones find by its name."""
REFERENCE = re.compile(r"\{([\w.-]+)\}")
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class StageConfig(Section):
    """A stage of a pipeline."""

    name: Name
    command: Literal["sft", "prefer", "reward-model", "run"]
    recipe: str
    """A TOML file, from the folder of the pipeline's file, or the name of a shipped recipe."""
    set: dict[str, Any] = Field(default={})
    """Keys of the recipe to change. "{STAGE}" is what an earlier stage makes: the folder of its
    model, or those of its reward models."""


class ScoresConfig(Section):
    """Scores of the model of each stage, by `headway eval`."""

    recipe: str
    """Recipe with the held-out sets, as that of a stage."""
    set: dict[str, Any] = Field(default={})
    samples: int = Field(default=1, ge=1)
    """Rollouts of each problem; one is greedy."""


class PipelineConfig(Section):
    """A file of stages."""

    name: Name
    set: dict[str, Any] = Field(default={})
    """Keys to change in every recipe; those of a stage take precedence."""
    stages: list[StageConfig] = Field(min_length=1)
    scores: ScoresConfig | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage with its recipe, completed, and what it makes."""

    name: str
    command: str
    arguments: tuple[str, ...]
    """Of the command: the recipe, and its settings."""
    config: RunConfig
    output: Path
    """Folder that the command makes; that of the exported model of a run."""
    needs: tuple[str, ...]
    """Earlier stages whose output it takes."""

    @property
    def makes_policy(self) -> bool:
        """True if the output is a model that answers prompts."""
        return self.command != "reward-model"

    @property
    def run_folder(self) -> Path:
        """Folder of the run, of `headway run`."""
        return self.config.deploy.runs_dir / self.config.name

    @property
    def made(self) -> str | list[str]:
        """The value by which another recipe names it: a folder, or those of the reward models."""
        if self.makes_policy or self.config.reward_model is None:
            return str(self.output)
        return [str(self.output / f"model-{i}") for i in range(self.config.reward_model.members)]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a file, in order, and the command that scores a model."""

    folder: Path
    """The folder of all that the stages make."""
    stages: tuple[Stage, ...]
    scores: tuple[str, ...] | None
    """Arguments of `headway eval` behind the model."""


def load_pipeline(file: str, runs_dir: Path) -> Pipeline:
    """Read a pipeline, by its file or as the name of a shipped one, and all of its recipes.

    Raises InputError if one is not valid, two stages make the same, or a stage needs a later one.
    """
    path = Path(file)
    if not path.exists() and (SHIPPED / f"{file}.toml").exists():
        path = SHIPPED / f"{file}.toml"
    try:
        document = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        names = sorted(shipped.stem for shipped in SHIPPED.glob("*.toml"))
        raise InputError(
            f"no pipeline {file!r}: neither a file nor one of {', '.join(names)}"
            f"{nearest(file, names)}"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"pipeline {file!r} cannot be read: {error}") from None
    parsed = parse_options(PipelineConfig, f"pipeline {file}", document)
    folder = runs_dir.absolute() / parsed.name
    stages: dict[str, Stage] = {}
    for given in parsed.stages:
        if given.name in stages:
            raise InputError(f"pipeline {file}: two stages have the name {given.name!r}")
        stage = _stage(parsed, given, folder, path.parent, stages)
        if same := [other.name for other in stages.values() if other.output == stage.output]:
            raise InputError(
                f"pipeline {file}: the stages {same[0]!r} and {given.name!r} both make "
                f'{stage.output}; set "{given.command.replace("-", "_")}.name" in one of them'
            )
        stages[given.name] = stage
    if parsed.scores is None:
        return Pipeline(folder, tuple(stages.values()), None)
    scores = parsed.scores
    overrides, _ = _overrides([parsed.set, scores.set], "scores.set", {})
    recipe = _recipe(scores.recipe, path.parent)
    load_recipe(recipe, overrides)
    place = f"deploy.runs_dir={toml_value(str(folder))}"
    suite = ("--suite", recipe, *_as_options([place, *overrides]), "--samples", str(scores.samples))
    return Pipeline(folder, tuple(stages.values()), suite)


def _stage(
    pipeline: PipelineConfig,
    given: StageConfig,
    folder: Path,
    here: Path,
    earlier: Mapping[str, Stage],
) -> Stage:
    recipe = _recipe(given.recipe, here)
    overrides, named = _overrides([pipeline.set, given.set], f"stage {given.name!r}", earlier)
    place = [f"name={toml_value(given.name)}", f"deploy.runs_dir={toml_value(str(folder))}"]
    load = partial(load_recipe, recipe)
    config = load([*place, *overrides])
    for section in SECTIONS:
        settings = getattr(config, section)
        if settings is not None and settings.name is None:
            place.append(f"{section}.name={toml_value(pipeline.name)}")
    config = for_this_machine(load([*place, *overrides]))
    if given.command != "run" and getattr(config, given.command.replace("-", "_")) is None:
        raise InputError(
            f"stage {given.name!r}: {given.recipe} has no section "
            f"[{given.command.replace('-', '_')}], which `headway {given.command}` needs"
        )
    output = _output(given.command, config)
    used = _inputs(given.command, config)
    needs = [
        stage.name for stage in earlier.values() if stage.name in named or stage.output in used
    ]
    arguments = (recipe, *_as_options([*place, *overrides]))
    return Stage(given.name, given.command, arguments, config, output, tuple(needs))


def _output(command: str, config: RunConfig) -> Path:
    """Return the folder of what a command makes of a recipe."""
    made = {
        "sft": config.warm_start,
        "prefer": config.preferred,
        "reward-model": config.reward_models,
        "run": config.deploy.runs_dir / f"{config.name}-model",
    }
    return made[command]


def _inputs(command: str, config: RunConfig) -> tuple[Path, ...]:
    """Return the folders of what a command takes, as far as the sections of the recipe make it."""
    if command == "sft":
        return ()
    if command == "run":
        return config.warm_start, config.preferred, config.reward_models
    return (config.warm_start,)


def _recipe(name: str, here: Path) -> str:
    """Return the path of a recipe beside the pipeline's file; else its name, as it is."""
    return str((here / name).absolute()) if (here / name).is_file() else name


def _as_options(overrides: Sequence[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def _overrides(
    tables: Sequence[Mapping[str, Any]], subject: str, earlier: Mapping[str, Stage]
) -> tuple[list[str], set[str]]:
    """Return settings as key=value, with the stages whose outputs they name."""
    named: set[str] = set()

    def value(given: Any) -> Any:
        if isinstance(given, list):
            return [value(part) for part in given]
        reference = REFERENCE.fullmatch(given) if isinstance(given, str) else None
        if reference is None:
            return given
        if (stage := earlier.get(reference[1])) is None:
            known = ", ".join(earlier) or "there is none"
            raise InputError(f"{subject}: {given!r} is no earlier stage; these are: {known}")
        named.add(stage.name)
        return stage.made

    def flat(table: Mapping[str, Any], above: str) -> Iterator[str]:
        for key, given in table.items():
            if isinstance(given, dict) and given:
                yield from flat(given, f"{above}{key}.")
            else:
                yield f"{above}{key}={toml_value(value(given))}"

    return [setting for table in tables for setting in flat(table, "")], named
