"""Loads and checks what a run is made from, before anything is written: model, prompts, rewards."""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.config import ActorsConfig
from actors.engines.model_folder import check_model, context_length, load_tokenizer, weight_shapes
from actors.engines.sampling_rules import check_sampling
from actors.environments.registry import load_environment, shipped_opening
from actors.environments.single_turn import opening
from actors.errors import InputError as ActorsInputError
from actors.errors import SourceFailed
from actors.reward_models.folder import check_reward_model
from actors.rewards import check_scorable, load_rewards
from actors.rollout.chat_rendering import Renderer
from actors.rollout.prompt_checks import check_fit
from actors.sources.filters import shorter, within_tokens, without_heldout
from actors.sources.mixture import Mixture
from actors.sources.protocol import PromptSource
from actors.sources.registry import load_source
from deploy.config.devices import visible_gpus
from deploy.config.evaluation_schedule import PlannedEvaluation, plan
from deploy.config.objective_rules import check_against_objective
from deploy.config.run_config import RunConfig
from deploy.config.weight_transport_rules import check_devices
from deploy.errors import InputError, exit_code_of
from deploy.observability import trackers
from deploy.observability.exporter import check_address, metrics_access
from deploy.preflight.disk_space import check_free_space, check_runs_dir
from deploy.preflight.models import model_path, reward_model_paths
from queues.policy.prompt_retirement import split
from queues.records import Prompt
from queues.runtime.cpu_affinity import parse_cores
from queues.runtime.output_limits import limited_output

CONNECT_SECONDS = 5.0
"""Deadline of a connection to a cluster."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything outside the recipe that a run starts from."""

    model_path: str
    source: PromptSource
    problems: list[Prompt]
    """Held-out problems, as many as the largest evaluation needs."""
    evaluations: list[PlannedEvaluation]
    reward_models: tuple[str, ...] = ()
    """Folders or hub names of the models behind the reward `reward_model`; empty without it."""


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
def load_inputs(config: RunConfig, *, resumed: Path | None = None) -> Inputs:
    """Find the models, open the sources, and check that they fit together.

    `resumed` is the checkpoint folder of a resumed run.

    Raises:
        InputError: Something is missing or cannot be used; names what is allowed. It may be the
            InputError of `actors`, `queues` or `learner`.
    """
    _check_machine(config)
    path = model_path(config)
    check_model(path)
    actors, prompts = config.actors, config.prompts
    if actors.engine == "vllm":
        check_sampling(path)
    scored_by = actors.heldout_reward or actors.reward
    load_scoring(config)
    evaluations, problems = load_heldout(config)
    all_prompts = load_training_source(config, problems)
    source: PromptSource = without_heldout(
        all_prompts, frozenset(problem.text for problem in problems)
    )
    if prompts.max_tokens is not None:
        fits = _within(actors, path, prompts.max_tokens)
        source = within_tokens(source, fits)
        kept = [problem for problem in problems if fits(problem)]
        if problems and not kept:
            raise InputError(
                f"prompts.max_tokens = {prompts.max_tokens}: every held-out problem is longer"
            )
        problems = kept
    try:
        beginning = source.cursor()
        first = source.next(prompts.groups_per_batch)
        source.restore(beginning)
        of_parts = all_prompts.one_of_each() if isinstance(all_prompts, Mixture) else []
    except SourceFailed as error:
        raise InputError(str(error)) from error
    if prompts.pass_rate_cap is not None:
        for prompt in first:
            split(prompt.prompt_id)
    check_scorable(actors.reward, [*first, *of_parts])
    check_scorable(scored_by, problems)
    sample = [*problems, *first]
    reward_models = reward_model_paths(config)
    for reward_model in reward_models:
        check_reward_model(
            reward_model,
            standardise=actors.reward_model.standardise,
            max_new_tokens=actors.max_new_tokens,
            max_model_len=actors.max_model_len or context_length(path),
            prompts=map(opening, sample),
            template_options=actors.chat_template_options,
        )
    if Path(path).is_dir():
        check_free_space(config, weight_shapes(path), resumed=resumed)
    _check_objective(config)
    check_fit(path, actors, sample)
    return Inputs(path, source, problems, evaluations, reward_models)


def _within(actors: ActorsConfig, path: str, max_tokens: int) -> Callable[[Prompt], bool]:
    """Return a predicate: a rollout begins with at most `max_tokens` tokens."""
    renderer = Renderer(load_tokenizer(path), actors.chat_template, actors.chat_template_options)
    begin = shipped_opening(
        actors.environment, actors.environment_options, code_execution=actors.code_execution
    )
    return shorter(renderer, max_tokens, begin or opening)


def load_scoring(config: RunConfig) -> None:
    """Import rewards and environment; raise InputError if one, or an option, is wrong."""
    actors = config.actors
    for names in (actors.reward, actors.heldout_reward or actors.reward):
        load_rewards(names, options=actors.reward_options, code_execution=actors.code_execution)
    load_environment(
        actors.environment, actors.environment_options, code_execution=actors.code_execution
    )


def load_training_source(config: RunConfig, problems: list[Prompt]) -> PromptSource:
    """Build the source of training prompts, which leaves out the held-out `problems` if its own."""
    prompts = config.prompts
    own = config.heldout is not None and config.heldout.source is None
    with _settings_named("prompts", prompts.source):
        return load_source(
            prompts.source,
            options=prompts.source_options,
            seed=config.seed,
            split="train",
            heldout_size=len(problems) if own else 0,
        )


@contextmanager
def _settings_named(section: str, source: str) -> Iterator[None]:
    """Name the section of a source in its errors."""
    try:
        yield
    except (ActorsInputError, SourceFailed) as error:
        if str(error).startswith("prompts.source"):
            raise
        raise InputError(f"{section}.source = {source!r}: {error}") from error


@_foreign_code()
def check_code(config: RunConfig) -> None:
    """Check what a recipe names and no model is needed for: `headway validate --strict`.

    Rewards, environment, sources, trackers and objective are found, and their options checked.

    Raises:
        InputError: One of them cannot be imported, or does not take its options.
    """
    load_scoring(config)
    trackers.check(config.deploy.trackers)
    _, problems = load_heldout(config)
    source = load_training_source(config, problems)
    actors = config.actors
    check_scorable(actors.heldout_reward or actors.reward, problems)
    with _settings_named("prompts", config.prompts.source):
        first = source.next(config.prompts.groups_per_batch)
    check_scorable(actors.reward, first)
    _check_objective(config)


def _check_machine(config: RunConfig) -> None:
    """Check the folder of runs, cores, devices, addresses and trackers."""
    deploy = config.deploy
    check_runs_dir(config)
    _check_cores(config)
    check_gpus(config, visible_gpus())
    check_devices(config.weight_sync, deploy.ray_address)
    _check_address(deploy.ray_address)
    if deploy.metrics:
        metrics_access(deploy)
        check_address(deploy.metrics_host, deploy.metrics_port)
    trackers.check(deploy.trackers)


def _check_objective(config: RunConfig) -> None:
    """Compute the objective of two made-up rollouts; imports torch.

    Raises:
        InputError: The objective, which may be the user's, raised or does not fit the recipe.
    """
    from learner.objective.checks import check_objective

    try:
        traits = check_objective(config.objective)
    except Exception as error:
        if exit_code_of(error) is not None:
            raise
        chosen = config.learner
        raise InputError(
            f"learner.advantage = {chosen.advantage!r}, loss = {chosen.loss!r} and correction = "
            f"{chosen.correction!r} raised {error!r} on two made-up rollouts"
        ) from error
    check_against_objective(config, traits)


def _check_address(address: str) -> None:
    """Connect to the address of a cluster once, since Ray itself would try for minutes.

    Raises:
        InputError: The connection failed.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"deploy.ray_address = {address!r}: no cluster answers there ({error}); start one with "
            '`ray start --head`, or use "local"'
        ) from None


def _check_cores(config: RunConfig) -> None:
    """Compare the cores of all roles with this machine's, if the run will be on it."""
    if config.deploy.ray_address != "local":
        return
    actors, available = config.actors, os.sched_getaffinity(0)
    entries = [("actors.cores has", entry) for entry in actors.cores or ()]
    if config.learner.cores is not None:
        entries.append(("learner.cores =", config.learner.cores))
    if actors.asks_reward_models and actors.reward_model.cores:
        entries.append(("actors.reward_model.cores =", actors.reward_model.cores))
    for setting, entry in entries:
        if not available.issuperset(parse_cores(entry)):
            raise InputError(
                f"{setting} {entry!r}, but this machine's cores are "
                f"{', '.join(str(core) for core in sorted(available))}"
            )


def check_gpus(config: RunConfig, available: int) -> None:
    """Refuse a run that names no GPUs on a machine with `available` of them, which are too few."""
    actors, learner = config.actors, config.learner
    named = "gpus" in actors.model_fields_set | learner.model_fields_set
    if config.deploy.ray_address == "local" and actors.engine == "vllm" and available and not named:
        raise InputError(
            f"this machine has {available} GPU(s), and learner.ranks = {learner.ranks} with "
            f"actors.count = {actors.count} × actors.tensor_parallel_size = "
            f"{actors.tensor_parallel_size} would take {learner.ranks} and "
            f"{actors.count * actors.tensor_parallel_size}; set learner.gpus and actors.gpus, "
            "which may be shares such as 0.5, or both to 0"
        )


def load_heldout(config: RunConfig) -> tuple[list[PlannedEvaluation], list[Prompt]]:
    """Plan the evaluations of a run, and load the problems of the largest one.

    Raises:
        InputError: The source of the held-out problems cannot be used, or two of them have one id.
    """
    section = config.heldout
    if section is None:
        return [], []
    planned = plan(section, steps=config.steps, temperature=config.actors.temperature)
    size = max(evaluation.size for evaluation in planned)
    source_name, options, owner = section.source, section.source_options, "heldout"
    if source_name is None:
        source_name, owner = config.prompts.source, "prompts"
        options = options or config.prompts.source_options
    with _settings_named(owner, source_name):
        source = load_source(
            source_name, options=options, seed=config.seed, split="heldout", heldout_size=size
        )
    try:
        problems = without_heldout(source, frozenset()).next(size)
    except SourceFailed as error:
        raise InputError(f"held-out problems: {error}") from error
    name, times = Counter(problem.prompt_id for problem in problems).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"held-out problems: {source_name!r} gives the prompt_id {name!r} to {times} of them, "
            "but each must have its own: their samples are told apart by it"
        )
    return planned, problems
