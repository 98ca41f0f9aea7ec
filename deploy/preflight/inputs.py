"""Loads and checks what a run is made from, before anything is written: model, prompts, rewards."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from actors.config import ActorsConfig
from actors.engines.model_folder import check_model, context_length, load_tokenizer, weight_shapes
from actors.engines.sampling_rules import check_sampling
from actors.environments.load_environment import load_environment, shipped_opening
from actors.environments.single_turn import opening
from actors.errors import SourceFailed
from actors.reward_models.folder import check_reward_model
from actors.rewards import check_scorable, load_rewards
from actors.rollout.chat_rendering import Renderer
from actors.rollout.prompt_checks import check_fit
from actors.sources.examples import DEMONSTRATIONS, PREFERENCES, load_examples
from actors.sources.filters import shorter, within_tokens, without_heldout
from actors.sources.fingerprints import go_on, of_prompts, watched
from actors.sources.load_source import load_source
from actors.sources.mixture import Mixture
from actors.sources.protocol import PromptSource, RestartableSource
from deploy.config.evaluation_schedule import PlannedEvaluation, plan
from deploy.config.objective_rules import check_against_objective
from deploy.config.run_config import RunConfig
from deploy.observability import trackers
from deploy.planner.disk_space import check_free_space
from deploy.preflight.machine import check_machine
from deploy.preflight.models import (
    check_adapter,
    check_examples,
    check_workers,
    find_model,
    model_path,
    reward_model_paths,
)
from deploy.preflight.provenance import fingerprint_of_model
from deploy.preflight.run_folders import check_run_folders
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import read_sessions
from headway.errors import HeadwayError, InputError
from headway.output_limits import limited_output
from queues.policy.prompt_retirement import split
from queues.readers.issued_prompts import heldout_problems, stored_cursor
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
    config: RunConfig, *, resumed: RunDirectory | None = None, check_space: bool = True
) -> Inputs:
    """Find the models, open the sources, and check that they fit together.

    The prompts of a resumed run must be those of its last session, unless prompts.on_change allows
    others. Without `check_space`, the run goes on with whatever space is free, and waits for more.

    Raises:
        InputError: Something is missing or cannot be used; names what is allowed. It may be the
            InputError of `actors`, `queues` or `learner`.
    """
    check_machine(config)
    path = model_path(config)
    check_model(path)
    check_workers(config, path)
    actors, prompts = config.actors, config.prompts
    if actors.engine == "vllm":
        check_sampling(path)
    scored_by = actors.heldout_reward or actors.reward
    load_scoring(config)
    evaluations, problems = load_heldout(config)
    all_prompts = load_training_source(config, problems)
    begun = None if resumed is None or not resumed.ledger.exists() else resumed.path
    recorded = heldout_problems(begun) if begun else []
    source: RestartableSource = without_heldout(
        watched(all_prompts, prompts.source_options),
        frozenset(problem.text for problem in (*problems, *recorded)),
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
    problems = _as_begun(config, problems, recorded)
    with _source_failures_named():
        beginning = source.cursor()
        first = source.next(prompts.groups_per_batch)
        source.restore(beginning)
        of_parts = all_prompts.one_of_each() if isinstance(all_prompts, Mixture) else []
        if begun and (cursor := stored_cursor(begun)) is not None:
            go_on(source, cursor, on_change=prompts.on_change)
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
    _check_weights(config, path, resumed, check_space=check_space)
    _check_objective(config)
    check_fit(path, actors, sample)
    models = _models(path, reward_models)
    if resumed is None:
        check_examples(config)
    else:
        _check_same_models(resumed, models)
    return Inputs(path, source, problems, evaluations, reward_models, models)


def _check_weights(
    config: RunConfig, path: str, resumed: RunDirectory | None, *, check_space: bool
) -> None:
    """Compare the free space, and the layers of new adapters, with the weights of models."""
    shapes, learner = weight_shapes(path) if Path(path).is_dir() else None, config.learner
    if shapes is not None and check_space:
        checkpoints = None if resumed is None else resumed.checkpoints
        check_free_space(config, shapes, check_run_folders(config), resumed=checkpoints)
    if resumed is not None:
        return
    check_adapter(learner.lora, path, section="learner.lora", shapes=shapes)
    if (critic := learner.critic) is not None:
        own = find_model(critic.path, setting="learner.critic.path") if critic.path else path
        check_adapter(critic.lora, own, section="learner.critic.lora")


def _models(path: str, reward_models: Sequence[str]) -> dict[str, str]:
    named = {"model": path, **{f"reward model {n}": p for n, p in enumerate(reward_models)}}
    return {name: fingerprint_of_model(path) for name, path in named.items()}


def _check_same_models(run: RunDirectory, models: Mapping[str, str]) -> None:
    """Refuse to resume a run whose model folders have other content than in its last session.

    Raises:
        InputError: One differs; names its role.
    """
    sessions = read_sessions(run)
    before = sessions[-1].get("models", {}) if sessions else {}
    for name, fingerprint in models.items():
        if before.get(name, fingerprint) != fingerprint:
            raise InputError(
                f"the {name} of {run.path.name} is not that of its last session ({before[name]} "
                f"before, {fingerprint} now), and scores and KL would not be comparable; put it "
                "back, or start a run of its own"
            )


def _as_begun(config: RunConfig, problems: list[Prompt], recorded: list[Prompt]) -> list[Prompt]:
    """Return the held-out problems that a resumed run began with; of a new run the present ones.

    Raises:
        InputError: Its sources give others now, and prompts.on_change refuses that.
    """
    before, now = of_prompts(recorded), of_prompts(problems[: len(recorded)])
    if before == now:
        return problems
    own = config.heldout and config.heldout.source
    setting, name = ("heldout", own) if own else ("prompts", config.prompts.source)
    if config.prompts.on_change == "refuse":
        raise InputError(
            f"{setting}.source = {name!r}: the held-out problems are not those that the run began "
            f"with ({before} before, {now} now), so that it could train what it is scored on. Put "
            "them back, or keep those of its ledger and train neither: "
            '--set prompts.on_change="new_epoch"'
        )
    return recorded


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
    return load_source(
        prompts.source,
        options=prompts.source_options,
        seed=config.seed,
        split="train",
        heldout_size=len(problems) if own else 0,
    )


@contextmanager
def _source_failures_named(prefix: str = "") -> Iterator[None]:
    """Report what a source does wrong as bad input."""
    try:
        yield
    except SourceFailed as error:
        raise InputError(f"{prefix}{error}") from error


@_foreign_code()
def check_code(config: RunConfig) -> None:
    """Check what a recipe names and no model is needed for: `headway validate --strict`.

    Rewards, environment, sources, examples, trackers and objective are found, and their options
    checked.

    Raises:
        InputError: One of them cannot be imported, or does not take its options.
    """
    load_scoring(config)
    trackers.check(config.deploy.trackers)
    _, problems = load_heldout(config)
    source = without_heldout(load_training_source(config, problems), frozenset())
    actors, texts = config.actors, frozenset(problem.text for problem in problems)
    check_scorable(actors.heldout_reward or actors.reward, problems)
    try:
        first = source.next(config.prompts.groups_per_batch)
    except SourceFailed as error:
        raise InputError(str(error)) from error
    check_scorable(actors.reward, first)
    sft, learned = config.sft, config.reward_model
    kinds = [(DEMONSTRATIONS, sft.demonstrations, sft.options)] if sft else []
    kinds += [(PREFERENCES, learned.pairs, learned.options)] if learned else []
    for kind, name, options in kinds:
        next(load_examples(kind, name, options=options, seed=config.seed, heldout=texts))
    _check_objective(config)


def _check_objective(config: RunConfig) -> None:
    """Compute the objective of two made-up rollouts; imports torch.

    Raises:
        InputError: The objective, which may be the user's, raised or does not fit the recipe.
    """
    from learner.objective.checks import check_objective

    try:
        traits = check_objective(config.objective)
    except HeadwayError:
        raise
    except Exception as error:
        chosen = config.learner
        raise InputError(
            f"learner.advantage = {chosen.advantage!r}, loss = {chosen.loss!r} and correction = "
            f"{chosen.correction!r} raised {error!r} on two made-up rollouts"
        ) from error
    check_against_objective(config, traits)


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
    source_name, options, setting = section.source, section.source_options, "heldout.source"
    if source_name is None:
        source_name, setting = config.prompts.source, "prompts.source"
        options = options or config.prompts.source_options
    source = load_source(
        source_name,
        options=options,
        seed=config.seed,
        split="heldout",
        heldout_size=size,
        setting=setting,
    )
    with _source_failures_named("held-out problems: "):
        problems = without_heldout(source, frozenset()).next(size)
    name, times = Counter(problem.prompt_id for problem in problems).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"held-out problems: {source_name!r} gives the prompt_id {name!r} to {times} of them, "
            "but each must have its own: their samples are told apart by it"
        )
    return planned, problems
