"""A pipeline: a TOML file of stages, each a command with a recipe, and what each depends on; pure.

A setting of a stage may be what an earlier one makes, as in `"model.path" = "{warm}"`. Stages with
the same recipe find what its sections make without that: all of it is named after the pipeline.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from deploy.config.devices import for_this_machine
from deploy.config.loader import load_recipe
from deploy.config.recipe_text import toml_key, toml_value
from deploy.config.run_config import RunConfig
from headway.errors import InputError
from headway.nearest_name import nearest
from headway.options import parse_options
from headway.recipe_section import Section

SHIPPED = Path(__file__).parents[1] / "recipes" / "pipelines"
SECTIONS = ("sft", "prefer", "reward_model")
"""Sections of a recipe whose commands make a folder that later ones find by its name."""
REFERENCE = re.compile(r"\{([\w.-]+)\}")
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


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
    def folders(self) -> tuple[Path, ...]:
        """Folders in that of the pipeline that no other stage may make."""
        if self.command == "run":
            return self.run_folder, self.output
        return (self.output if self.command == "reward-model" else self.output.parent,)

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
    suite: RunConfig | None = None
    """Their recipe."""


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
    if (folder / "recipe.toml").exists():
        raise InputError(f"pipeline {file}: {folder} is the folder of a run; choose another name")
    stages: dict[str, Stage] = {}
    for given in parsed.stages:
        with _named(f"pipeline {file}, stage {given.name!r}"):
            stages[given.name] = _stage(parsed, given, folder, path.parent, stages)
    if parsed.scores is None:
        return Pipeline(folder, tuple(stages.values()), None)
    scores = parsed.scores
    with _named(f"pipeline {file}, scores"):
        overrides, _ = _overrides([parsed.set, scores.set], {})
        recipe = _recipe(scores.recipe, path.parent)
        scored = load_recipe(recipe, overrides)
    place = f"deploy.runs_dir={toml_value(str(folder))}"
    suite = ("--suite", recipe, *_as_options([place, *overrides]), "--samples", str(scores.samples))
    return Pipeline(folder, tuple(stages.values()), suite, scored)


@contextmanager
def _named(subject: str) -> Iterator[None]:
    """Put what they are about before errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{subject}: {error}") from None


def _stage(
    pipeline: PipelineConfig,
    given: StageConfig,
    folder: Path,
    here: Path,
    earlier: Mapping[str, Stage],
) -> Stage:
    if given.name in earlier:
        raise InputError("an earlier stage has the same name")
    recipe = _recipe(given.recipe, here)
    overrides, named = _overrides([pipeline.set, given.set], earlier)
    place = [f"name={toml_value(given.name)}", f"deploy.runs_dir={toml_value(str(folder))}"]
    load = partial(load_recipe, recipe)
    config = load([*place, *overrides])
    if (config.name, config.deploy.runs_dir) != (given.name, folder):
        raise InputError("name and deploy.runs_dir are those of the stage; leave them out of set")
    for section in SECTIONS:
        settings = getattr(config, section)
        if settings is not None and settings.name is None:
            place.append(f"{section}.name={toml_value(pipeline.name)}")
    config = for_this_machine(load([*place, *overrides]))
    section = given.command.replace("-", "_")
    if given.command != "run" and getattr(config, section) is None:
        raise InputError(
            f"{given.recipe} has no section [{section}], which `headway {given.command}` needs"
        )
    inputs = _inputs(given.command, config)
    made = {one.output: one.name for one in earlier.values()}
    if missing := [command for command, path in inputs.items() if path not in made]:
        raise InputError(
            f"its recipe takes what `headway {missing[0]}` makes, {inputs[missing[0]]}, and no "
            "earlier stage makes that; put one before it, or leave the section out"
        )
    named |= {made[path] for path in inputs.values()}
    stage = Stage(
        given.name,
        given.command,
        (recipe, *_as_options([*place, *overrides])),
        config,
        _output(given.command, config),
        tuple(name for name in earlier if name in named),
    )
    for other in earlier.values():
        if same := {*stage.folders} & {*other.folders}:
            raise InputError(
                f"the stages {other.name!r} and {given.name!r} both make {same.pop()}; name one "
                f"otherwise, or set {section}.name in it"
            )
    return stage


def _output(command: str, config: RunConfig) -> Path:
    """Return the folder of what a command makes of a recipe."""
    made = {
        "sft": config.warm_start,
        "prefer": config.preferred,
        "reward-model": config.reward_models,
        "run": config.deploy.runs_dir / f"{config.name}-model",
    }
    return made[command]


def _inputs(command: str, config: RunConfig) -> dict[str, Path]:
    """Return folders that a command takes by the sections of its recipe, by their commands."""
    inputs, section = dict[str, Path](), config.reward_model
    if command == "run" and config.prefer is not None:
        inputs["prefer"] = config.preferred
    elif command == "reward-model" and section is not None and section.path is not None:
        return {}
    elif command != "sft" and config.sft is not None:
        inputs["sft"] = config.warm_start
    actors = config.actors
    if command == "run" and actors.asks_reward_models and not actors.reward_model.named:
        inputs["reward-model"] = config.reward_models
    return inputs


def _recipe(name: str, here: Path) -> str:
    """Return the path of a recipe beside the pipeline's file; else its name, as it is."""
    return str((here / name).absolute()) if (here / name).is_file() else name


def _as_options(overrides: Sequence[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def _overrides(
    tables: Sequence[Mapping[str, Any]], earlier: Mapping[str, Stage]
) -> tuple[list[str], set[str]]:
    """Return settings as key=value, with the stages whose outputs they name."""
    named: set[str] = set()

    def value(given: Any) -> Any:
        if isinstance(given, dict):
            return {key: value(part) for key, part in given.items()}
        if isinstance(given, list):
            return [*chain.from_iterable(map(values, given))]
        reference = REFERENCE.fullmatch(given) if isinstance(given, str) else None
        if reference is None:
            return given
        if (stage := earlier.get(reference[1])) is None:
            known = ", ".join(earlier) or "there is none"
            raise InputError(f"{given!r} in set is no earlier stage; these are: {known}")
        named.add(stage.name)
        return stage.made

    def values(given: Any) -> list[Any]:
        made = value(given)
        return made if isinstance(given, str) and isinstance(made, list) else [made]

    def flat(table: Mapping[str, Any], above: str) -> Iterator[str]:
        for key, given in table.items():
            name = f"{above}.{toml_key(key)}" if above else key
            if isinstance(given, dict) and given:
                yield from flat(given, name)
            else:
                yield f"{name}={toml_value(value(given))}"

    return [setting for table in tables for setting in flat(table, "")], named
