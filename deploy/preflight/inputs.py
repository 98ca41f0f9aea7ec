"""Loads and checks what a run is made from, before anything is written: model, prompts, rewards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from actors.engines.model_folder import check_model, weight_shapes
from actors.sources.examples import DEMONSTRATIONS, PREFERENCES, load_examples
from actors.sources.protocol import RestartableSource
from deploy.config.evaluation_schedule import PlannedEvaluation
from deploy.config.run_config import RunConfig
from deploy.observability import trackers
from deploy.preflight.loaded_checks import (
    CHECKS,
    CHECKS_OF_NEW,
    CHECKS_OF_RESUMED,
    Loaded,
    check_objective,
    check_prompts,
    check_scoring,
    check_space,
)
from deploy.preflight.machine_checks import check_machine
from deploy.preflight.model_origins import fingerprint_of_model
from deploy.preflight.models import model_path, reward_model_paths
from deploy.preflight.prompts import open_prompts
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from headway.output_limits import limited_output
from queues.records import Prompt


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything outside the recipe that a run starts from."""

    model_path: str
    source: RestartableSource
    problems: list[Prompt]
    """Held-out problems, as many as the largest evaluation needs; of a resumed run those that it
    began with."""
    evaluations: list[PlannedEvaluation]
    reward_models: tuple[str, ...] = ()
    """Folders or hub names of the models behind the reward `reward_model`; empty without it."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the initial weights and of the reward models, by their role."""


@contextmanager
def _foreign_code() -> Iterator[None]:
    """Limit what sources and libraries print, and refuse those that would end the command."""
    try:
        with limited_output("sources and libraries"):
            yield
    except SystemExit as error:
        raise InputError(
            f"code that the recipe names ended by {error!r}, which would end the command"
        ) from error


@_foreign_code()
def load_inputs(
    config: RunConfig, *, resumed: RunDirectory | None = None, needs_space: bool = True
) -> Inputs:
    """Find the models, open the sources, and check that they fit together.

    The prompts of a resumed run must be those of its last session, unless prompts.on_change allows
    others. Unless it `needs_space`, the run goes on with whatever is free, and waits for more.

    Raises:
        InputError: Something is missing or cannot be used; names what is allowed.
    """
    check_machine(config)
    loaded = _load(config, resumed)
    further = CHECKS_OF_NEW if resumed is None else CHECKS_OF_RESUMED
    for check in (*CHECKS, *further):
        check(loaded)
    if needs_space:
        check_space(loaded)
    prompts = loaded.prompts
    return Inputs(
        loaded.model_path,
        prompts.source,
        prompts.problems,
        prompts.evaluations,
        loaded.reward_models,
        loaded.fingerprints,
    )


def _load(config: RunConfig, resumed: RunDirectory | None) -> Loaded:
    """Find the models, import the user's code, and open the sources."""
    path = model_path(config)
    check_model(path)
    check_scoring(config)
    begun = resumed.path if resumed is not None and resumed.ledger.exists() else None
    prompts = open_prompts(config, model_path=path, begun=begun)
    reward_models = reward_model_paths(config)
    named = {"model": path, **{f"reward model {n}": p for n, p in enumerate(reward_models)}}
    return Loaded(
        config=config,
        model_path=path,
        shapes=weight_shapes(path) if Path(path).is_dir() else None,
        prompts=prompts,
        reward_models=reward_models,
        fingerprints={name: fingerprint_of_model(folder) for name, folder in named.items()},
        resumed=resumed,
    )


@_foreign_code()
def check_code(config: RunConfig) -> None:
    """Check what a recipe names and no model is needed for: `headway validate --strict`.

    Rewards, environment, sources, examples, trackers and objective are found, and their options
    checked.

    Raises:
        InputError: One of them cannot be imported, or does not take its options.
    """
    check_scoring(config)
    trackers.check(config.deploy.trackers)
    prompts = open_prompts(config)
    check_prompts(config, prompts)
    texts = frozenset(problem.text for problem in prompts.problems)
    sft, learned = config.sft, config.reward_model
    kinds = [(DEMONSTRATIONS, sft.demonstrations, sft.options)] if sft else []
    kinds += [(PREFERENCES, learned.pairs, learned.options)] if learned else []
    for kind, name, options in kinds:
        next(load_examples(kind, name, options=options, seed=config.seed, heldout=texts))
    check_objective(config)
