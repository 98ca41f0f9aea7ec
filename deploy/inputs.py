"""What a run is made from, checked before anything is written: model, prompts, evaluations."""

import json
from dataclasses import dataclass
from pathlib import Path

from actors.environments.environment import load_environment
from actors.rewards import load_rewards
from actors.sources.source import PromptSource, load_source
from actors.sources.without_heldout import WithoutHeldout
from deploy import heldout
from deploy.config import RunConfig
from deploy.errors import InputError
from learner.update import check_objective
from queues.records import Prompt

ORIGIN_FILE = "origin.json"
"""In the folder of a warm start: what it was made from."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything outside the recipe that a run starts from."""

    model_path: str
    source: PromptSource
    problems: list[Prompt]
    """Held-out, as many as the largest evaluation needs."""
    evaluations: list[heldout.Planned]


def load_inputs(config: RunConfig) -> Inputs:
    """Finds the model and opens the sources.

    Raises:
        InputError: Of this package, `actors` or `learner`: what is missing or cannot be used, and
            what would do.
    """
    check_objective(config.objective)
    load_rewards(config.actors.reward)
    load_environment(config.actors.environment)
    evaluations, problems = load_heldout(config)
    prompts = config.prompts
    own = config.heldout is not None and config.heldout.source is None
    source = load_source(
        prompts.source,
        options=prompts.source_options,
        seed=config.seed,
        split="train",
        heldout_size=len(problems) if own else 0,
    )
    texts = frozenset(problem.text for problem in problems)
    return Inputs(model_path(config), WithoutHeldout(source, texts), problems, evaluations)


def load_heldout(config: RunConfig) -> tuple[list[heldout.Planned], list[Prompt]]:
    """The evaluations of a run, and the problems of the largest one.

    Raises:
        InputError: The source of the held-out problems cannot be used.
    """
    section = config.heldout
    if section is None:
        return [], []
    planned = heldout.plan(section, steps=config.steps, temperature=config.actors.temperature)
    size = max(evaluation.size for evaluation in planned)
    named, options = section.source, section.source_options
    if named is None:
        named, options = config.prompts.source, options or config.prompts.source_options
    source = load_source(
        named, options=options, seed=config.seed, split="heldout", heldout_size=size
    )
    return planned, WithoutHeldout(source, frozenset()).next(size)


def warm_start_origin(config: RunConfig) -> str:
    """What a warm start depends on, as JSON; two that differ are different models."""
    sections = config.model_dump(mode="json", include={"seed", "model", "sft"})
    return json.dumps(sections, sort_keys=True)


def model_path(config: RunConfig) -> str:
    """The folder or hub name of the initial weights.

    Raises:
        InputError: The recipe has a warm start that was not made yet, or was made by other
            settings, or it names a missing folder.
    """
    if config.sft is not None:
        return _warm_start(config)
    path = config.model.path
    if path is None:
        raise InputError(
            "the recipe builds a model from scratch ([model.tiny]) but has no [sft] section; "
            "random weights answer nothing, so there is nothing to reinforce"
        )
    local = Path(path).expanduser()
    if path.startswith((".", "/", "~")) and not (local / "config.json").exists():
        raise InputError(f"model.path = {path!r}: no config.json there; give a model folder")
    return str(local.absolute()) if local.exists() else path


def _warm_start(config: RunConfig) -> str:
    folder = config.warm_start
    if not (folder / "config.json").exists():
        raise InputError(
            f"the recipe has an [sft] section, but {folder} does not exist yet; run `headway sft` "
            "with the same recipe and settings first"
        )
    if (folder / ORIGIN_FILE).read_text() != warm_start_origin(config):
        raise InputError(
            f"{folder} was made with another seed, [model] or [sft]; run `headway sft --replace` "
            "with the same recipe and settings, or choose another name"
        )
    return str(folder.absolute())
