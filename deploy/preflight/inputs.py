"""What a run is made from, checked before anything is written: model, prompts, evaluations."""

import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.engines.model_folder import check_model, context_length, load_tokenizer, weight_shapes
from actors.environments.registry import load_environment
from actors.errors import SourceFailed
from actors.reward_models.folder import check_reward_model
from actors.rewards import check_scorable, load_rewards
from actors.rollout.prompt_checks import check_fit
from actors.sources.filters import shorter, within_tokens, without_heldout
from actors.sources.mixture import Mixture
from actors.sources.protocol import PromptSource
from actors.sources.registry import load_source
from deploy.config import evaluation_schedule as heldout
from deploy.config.objective_rules import check_against_objective
from deploy.config.run_config import RunConfig
from deploy.config.weight_transport_rules import check_devices
from deploy.errors import InputError
from deploy.observability import trackers
from deploy.observability.exporter import check_address
from deploy.preflight.disk_space import check_room, check_runs_dir
from deploy.preflight.provenance import (
    refuse_another_origin,
    reward_model_origin,
    same_warm_starts,
    warm_start_origin,
)
from queues.policy.prompt_retirement import split
from queues.records import Prompt
from queues.runtime.cpu_affinity import parse_cores

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")

KNOCK_SECONDS = 5.0
"""Deadline of a connection to a cluster."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything outside the recipe that a run starts from."""

    model_path: str
    source: PromptSource
    problems: list[Prompt]
    """Held-out, as many as the largest evaluation needs."""
    evaluations: list[heldout.Planned]
    reward_models: tuple[str, ...] = ()
    """Folders or hub names of the models behind the reward `reward_model`, where it is used."""


def load_inputs(config: RunConfig, *, resumed: Path | None = None) -> Inputs:
    """Finds the model and opens the sources.

    Args:
        config: The recipe.
        resumed: The folder of the checkpoints of a run that goes on; None for a new one.

    Raises:
        InputError: Of this package, `actors`, `queues` or `learner`: what is missing or cannot be
            used, and what would do.
    """
    check_runs_dir(config)
    _check_cores(config)
    check_devices(config.weight_sync, config.deploy.ray_address)
    _check_address(config.deploy.ray_address)
    if config.deploy.metrics:
        check_address(config.deploy.metrics_host, config.deploy.metrics_port)
    trackers.check(config.deploy.trackers)
    path = model_path(config)
    check_model(path)
    scored_by = config.actors.heldout_reward or config.actors.reward
    for names in (config.actors.reward, scored_by):
        load_rewards(
            names,
            options=config.actors.reward_options,
            code_execution=config.actors.code_execution,
        )
    load_environment(
        config.actors.environment,
        config.actors.environment_options,
        code_execution=config.actors.code_execution,
    )
    evaluations, problems = load_heldout(config)
    prompts = config.prompts
    own = config.heldout is not None and config.heldout.source is None
    all_prompts = load_source(
        prompts.source,
        options=prompts.source_options,
        seed=config.seed,
        split="train",
        heldout_size=len(problems) if own else 0,
    )
    source: PromptSource = without_heldout(
        all_prompts, frozenset(problem.text for problem in problems)
    )
    if prompts.max_tokens is not None:
        fits = shorter(load_tokenizer(path), config.actors.chat_template, prompts.max_tokens)
        source = within_tokens(source, fits)
        kept = [problem for problem in problems if fits(problem)]
        if problems and not kept:
            raise InputError(
                f"prompts.max_tokens = {prompts.max_tokens}: every held-out problem is longer"
            )
        problems = kept
    with _refused():
        first = _first(source, prompts.groups_per_batch)
        of_parts = all_prompts.one_of_each() if isinstance(all_prompts, Mixture) else []
    if prompts.pass_rate_cap is not None:
        for prompt in first:
            split(prompt.prompt_id)
    check_scorable(config.actors.reward, [*first, *of_parts])
    check_scorable(scored_by, problems)
    tried = [*problems, *first]
    judges = reward_model_paths(config)
    for judge in judges:
        check_reward_model(
            judge,
            standardise=config.actors.reward_model.standardise,
            max_new_tokens=config.actors.max_new_tokens,
            max_model_len=config.actors.max_model_len or context_length(path),
            prompts=(prompt.text for prompt in tried),
        )
    if Path(path).is_dir():
        check_room(config, weight_shapes(path), resumed=resumed)
    _check_objective(config)
    check_fit(path, config.actors, tried)
    return Inputs(path, source, problems, evaluations, judges)


def _first(source: PromptSource, count: int) -> list[Prompt]:
    """The prompts that a source will give first; it is left where it was."""
    cursor = source.cursor()
    first = source.next(count)
    source.restore(cursor)
    return first


@contextmanager
def _refused() -> Iterator[None]:
    """A source that raises, or gives something else than prompts, cannot be used: InputError."""
    try:
        yield
    except SourceFailed as error:
        raise InputError(str(error)) from error


def _check_objective(config: RunConfig) -> None:
    """Computes the objective of two made-up rollouts; imports torch.

    Raises:
        InputError: Of `learner`, or what code of the user's raised.
    """
    from learner.objective.checks import check_objective

    try:
        traits = check_objective(config.objective)
    except Exception as error:
        if hasattr(error, "exit_code"):
            raise
        chosen = config.learner
        raise InputError(
            f"learner.advantage = {chosen.advantage!r}, loss = {chosen.loss!r} and correction = "
            f"{chosen.correction!r} raised {error!r} on two made-up rollouts"
        ) from error
    check_against_objective(config, traits)


def _check_address(address: str) -> None:
    """Knocks at the address of a cluster: Ray itself would try for minutes.

    Raises:
        InputError: Nobody listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"deploy.ray_address = {address!r}: no cluster answers there ({error}); start one with "
            '`ray start --head`, or use "local"'
        ) from None


def _check_cores(config: RunConfig) -> None:
    """Compares the cores of all roles with this machine's, where they will run on it."""
    if config.deploy.ray_address != "local":
        return
    actors, there = config.actors, os.sched_getaffinity(0)
    wanted = [("actors.cores has", entry) for entry in actors.cores or ()]
    if config.learner.cores is not None:
        wanted.append(("learner.cores =", config.learner.cores))
    if actors.asks_reward_models and actors.reward_model.cores:
        wanted.append(("actors.reward_model.cores =", actors.reward_model.cores))
    for said, entry in wanted:
        if not there.issuperset(parse_cores(entry)):
            raise InputError(
                f"{said} {entry!r}, but this machine's cores are "
                f"{', '.join(str(core) for core in sorted(there))}"
            )


def load_heldout(config: RunConfig) -> tuple[list[heldout.Planned], list[Prompt]]:
    """The evaluations of a run, and the problems of the largest one.

    Raises:
        InputError: The source of the held-out problems cannot be used, or two of them have one id.
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
    try:
        problems = without_heldout(source, frozenset()).next(size)
    except SourceFailed as error:
        raise InputError(f"held-out problems: {error}") from error
    name, times = Counter(problem.prompt_id for problem in problems).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"held-out problems: {named!r} gives the prompt_id {name!r} to {times} of them, but "
            "each must have its own: their samples are told apart by it"
        )
    return planned, problems


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
    return find_model(path)


def reward_model_paths(config: RunConfig) -> tuple[str, ...]:
    """Folders or hub names of the models behind the reward `reward_model`; none without it.

    Raises:
        InputError: They are named and missing, or not made yet, or made by other settings.
    """
    named, folder = config.actors.reward_model.paths, config.reward_models
    if not config.actors.asks_reward_models:
        return ()
    if named:
        return tuple(find_model(path, setting="actors.reward_model.paths") for path in named)
    found = sorted(folder.glob("model-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        raise InputError(
            f'the reward "reward_model" needs {folder}, which does not exist yet; run `headway '
            "reward-model` with the same recipe and settings first, or name model folders in "
            "actors.reward_model.paths"
        )
    refuse_another_origin(
        folder,
        reward_model_origin(config),
        "run `headway reward-model --replace` with the same recipe and settings, or name the model "
        "folders in actors.reward_model.paths",
    )
    return tuple(str(path.absolute()) for path in found)


def find_model(path: str, *, setting: str = "model.path") -> str:
    """The folder, made absolute, or hub name that a setting such as `model.path` stands for.

    Raises:
        InputError: There is no such folder, and it is no hub name either.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local.absolute())
    if local.exists():
        raise InputError(f"{setting} = {path!r} is a file; give the model folder that it is in")
    if not HUB_NAME.fullmatch(path):
        raise InputError(
            f"{setting} = {path!r}: there is no such folder from {Path.cwd()}; give a model "
            'folder, or a hub name of the form "organisation/name"'
        )
    return path


def _warm_start(config: RunConfig) -> str:
    folder = config.warm_start
    if not (folder / "config.json").exists():
        made = same_warm_starts(config)
        hint = f', or set sft.name = "{made[0]}", which was made with these' if made else ""
        raise InputError(
            f"the recipe has an [sft] section, but {folder} does not exist yet; run `headway sft` "
            f"with the same recipe and settings first{hint}"
        )
    refuse_another_origin(
        folder,
        warm_start_origin(config),
        "run `headway sft --replace` with the same recipe and settings, or choose another name",
    )
    return str(folder.resolve())  # other nodes may have what a link leads to, not the link
