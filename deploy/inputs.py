"""What a run is made from, checked before anything is written: model, prompts, evaluations."""

from dataclasses import dataclass
from pathlib import Path

from actors.rewards import load_rewards
from actors.sources.source import PromptSource, load_source
from deploy import heldout
from deploy.config import RunConfig
from deploy.errors import InputError
from queues.records import Prompt


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
        InputError: Of this package or of `actors`: what is missing, and what would provide it.
    """
    load_rewards(config.actors.reward)
    evaluations = (
        heldout.plan(config.heldout, steps=config.steps, temperature=config.actors.temperature)
        if config.heldout
        else []
    )
    size = max((planned.size for planned in evaluations), default=0)
    prompts = config.prompts
    source = load_source(
        prompts.source,
        options=prompts.source_options,
        seed=config.seed,
        split="train",
        heldout_size=0 if config.heldout and config.heldout.source else size,
    )
    problems: list[Prompt] = []
    if config.heldout:
        problems = load_source(
            config.heldout.source or prompts.source,
            options=config.heldout.source_options or prompts.source_options,
            seed=config.seed,
            split="heldout",
            heldout_size=size,
        ).next(size)
    return Inputs(model_path(config), source, problems, evaluations)


def model_path(config: RunConfig) -> str:
    """The folder or hub name of the initial weights.

    Raises:
        InputError: The recipe has a warm start that was not made yet, or names a missing folder.
    """
    if config.sft is not None:
        if not (config.warm_start / "config.json").exists():
            raise InputError(
                f"the recipe has an [sft] section, but {config.warm_start} does not exist yet; "
                "run `headway sft` with the same recipe first"
            )
        return str(config.warm_start.absolute())
    path = config.model.path
    if path is None:
        raise InputError(
            "the recipe builds a model from scratch ([model.tiny]) but has no [sft] section; "
            "random weights answer nothing, so there is nothing to reinforce"
        )
    local = Path(path)
    if path.startswith((".", "/", "~")) and not (local.expanduser() / "config.json").exists():
        raise InputError(f"model.path = {path!r}: no config.json there; give a model folder")
    return str(local.absolute()) if local.exists() else path
