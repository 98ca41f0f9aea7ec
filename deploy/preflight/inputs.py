"""Loads and checks what a run is made from, before anything is written: model, prompts, rewards.

Every function raises InputError for what is missing or cannot be used, and names what is allowed.
"""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from actors.engines.model_folder import (
    check_model,
    context_length,
    refuse_quantised,
    weight_shapes,
)
from actors.engines.sampling_rules import check_sampling
from actors.environments.load_environment import load_environment
from actors.environments.single_turn import opening
from actors.programs.load_agent import load_agent
from actors.reward_models.folder import check_reward_model
from actors.rewards.find_reward import is_of_group
from actors.rewards.pairwise_judge import load_pair_judge
from actors.rewards.rewards import check_scorable, load_rewards
from actors.rollout.prompt_checks import check_fit
from actors.sources.examples import (
    DEMONSTRATIONS,
    HELDOUT_DEMONSTRATIONS,
    LABELLED_STEPS,
    load_examples,
    read_examples,
)
from actors.sources.preferences import PREFERENCES, REWARD_MODEL_PAIRS
from deploy.config.deploy_config import STALL_FACTOR
from deploy.config.rules import check_against_objective
from deploy.config.run_config import RunConfig
from deploy.observability import trackers
from deploy.preflight.answers import check_answers
from deploy.preflight.machine_checks import (
    check_free_space,
    check_gpus,
    check_machine,
    check_run_folders,
)
from deploy.preflight.models import (
    check_adapter,
    check_teacher,
    check_workers,
    find_model,
    fingerprint_of_model,
    model_path,
    reward_model_paths,
    teacher_paths,
)
from deploy.preflight.prompts import OpenedPrompts, open_prompts
from deploy.storage.remote_folder import RemoteFolder
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import read_sessions
from headway.errors import HeadwayError, InputError
from headway.output_limits import limited_output
from headway.user_code import where_raised
from learner.config.learner import LearnerConfig
from queues.policy.curriculum import Curriculum
from queues.policy.prompt_retirement import split

_LATE = signal.SIGRTMIN + 2  # after those of `deploy.runtime.signals`


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything outside the recipe that a run starts from."""

    model_path: str
    prompts: OpenedPrompts
    reward_models: tuple[str, ...] = ()
    """Folders or hub names of the models behind the reward `reward_model`; empty without it."""
    teachers: tuple[str, ...] = ()
    """Folders or hub names of the teachers of a distillation."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the initial weights, reward models and teachers, by their role."""


def check_scoring(config: RunConfig) -> None:
    """Import rewards and environment, and check their options."""
    actors = config.actors
    load_rewards(
        actors.all_rewards, options=actors.reward_options, code_execution=actors.code_execution
    )
    if load_agent(actors) is None:
        load_environment(
            actors.environment, actors.environment_options, code_execution=actors.code_execution
        )
    _check_groups(config)


def _check_groups(config: RunConfig) -> None:
    """Refuse rewards that compare a group where rollouts are scored one by one."""
    actors, size = config.actors, config.prompts.group_size
    heldout = actors.heldout_reward
    if heldout is None:
        heldout = actors.reward if config.heldout else ()
    key = (
        "actors.heldout_reward"
        if actors.heldout_reward
        else "actors.heldout_reward = actors.reward"
    )
    gold = actors.gold.reward if actors.gold else ()
    for setting, names in ((key, heldout), ("actors.gold.reward", gold)):
        for name in filter(is_of_group, names):
            raise InputError(
                f"{setting} has {name!r}, which compares the rollouts of a group, and here each is "
                "scored alone; name rewards of single completions there"
            )
    if size < 2 and (of_group := [*filter(is_of_group, actors.reward)]):
        raise InputError(
            f"actors.reward = {of_group[0]!r} compares the rollouts of a group, and "
            f"prompts.group_size = {size}; give 2 or more"
        )


def check_prompts(config: RunConfig, prompts: OpenedPrompts) -> None:
    """Refuse prompts that the rewards cannot score, or that could not be known again if retired."""
    actors = config.actors
    if config.prompts.pass_rate_cap is not None:
        for prompt in prompts.first:
            split(prompt.prompt_id)
    if (curriculum := config.prompts.curriculum) is not None:
        for prompt in [*prompts.first, *prompts.of_parts]:
            Curriculum(curriculum, seed=config.seed).key(prompt)
    heldout, rows = actors.heldout_reward or actors.reward, prompts.rows or prompts.first
    gold = actors.gold.reward if actors.gold else ()
    check_scorable([*actors.reward, *gold], [*prompts.of_parts, *rows])
    check_scorable(heldout, prompts.heldout)
    check_answers(actors, actors.reward, [*rows, *prompts.of_parts])
    check_answers(actors, heldout, prompts.heldout)


def check_objective(config: RunConfig) -> None:
    """Compute the objective of two made-up rollouts, which may be the user's; imports torch."""
    from learner.objective.checks import check_objective as traits_of

    try:
        traits = traits_of(config.objective)
    except HeadwayError:
        raise
    except Exception as error:
        chosen = config.learner
        raise InputError(
            f"learner.advantage = {chosen.advantage!r}, loss = {chosen.loss!r} and correction = "
            f"{chosen.correction!r} raised {error!r} on two made-up rollouts"
        ) from error
    check_against_objective(config, traits)


def _check_fit(config: RunConfig, inputs: Inputs) -> None:
    """Compare engine, prompts, objective, teachers and reward models with the model."""
    actors, path = config.actors, inputs.model_path
    check_workers(config, path)
    if actors.engine == "vllm":
        check_sampling(path)
    check_prompts(config, inputs.prompts)
    check_objective(config)
    check_fit(path, actors, inputs.prompts.sample)
    longest = actors.max_model_len or context_length(path)
    for teacher in inputs.teachers:
        check_teacher(teacher, path, longest)
    for judge in inputs.reward_models:
        check_reward_model(judge, actors, longest, map(opening, inputs.prompts.sample))


def _check_learner(learner: LearnerConfig, path: str) -> None:
    """Check critic and reference of a run that begins, and compare adapters with their models."""
    check_adapter(learner.lora, path, section="learner.lora")
    if learner.kl is not None and learner.kl.reference is not None:
        refuse_quantised(find_model(learner.kl.reference, setting="learner.kl.reference"))
    if (critic := learner.critic) is not None:
        own = find_model(critic.path, setting="learner.critic.path") if critic.path else path
        refuse_quantised(own)
        check_adapter(critic.lora, own, section="learner.critic.lora")


def _check_models(models: Mapping[str, str], resumed: RunDirectory) -> None:
    """Refuse to resume a run whose model folders have other content than in its last session."""
    sessions = read_sessions(resumed)
    before = sessions[-1].get("models", {}) if sessions else {}
    for name, fingerprint in models.items():
        if before.get(name, fingerprint) != fingerprint:
            raise InputError(
                f"the {name} of {resumed.path.name} is not that of its last session "
                f"({before[name]} before, {fingerprint} now), and scores and KL would not be "
                "comparable; put it back, or start a run of its own"
            )


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


@contextmanager
def _in_time(config: RunConfig) -> Iterator[None]:
    """Refuse code of the recipe that has not ended by the time in which a run may stall.

    A signal ends it wherever it waits; in threads other than the main one nothing does.
    """
    seconds, main, is_late = config.deploy.stall_seconds, threading.main_thread(), threading.Event()

    def interrupt(*_: object) -> None:
        is_late.set()
        raise KeyboardInterrupt  # code that tries everything again does not catch it

    if threading.current_thread() is not main or main.ident is None:
        yield
        return
    signal.signal(_LATE, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (main.ident, _LATE))
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        if not is_late.is_set():
            raise
        raise InputError(
            f"code that the recipe names did not answer within {seconds:g} s, {STALL_FACTOR} times "
            f"deploy.watchdog_seconds; it waits here:{where_raised(error)}"
        ) from None
    finally:
        timer.cancel()
        signal.signal(_LATE, signal.SIG_IGN)  # it may be under way


@_foreign_code()
def load_inputs(
    config: RunConfig, *, resumed: RunDirectory | None = None, needs_space: bool = True
) -> Inputs:
    """Find the models, open the sources, and check that they fit together.

    The prompts of a resumed run must be those of its last session, unless prompts.on_change allows
    others. Unless it `needs_space`, on disk and in memory, the run goes on with whatever is free,
    and waits for more.
    """
    folders = check_run_folders(config)
    check_machine(config)
    inputs = _load(config, resumed)
    _check_fit(config, inputs)
    if resumed is None:
        _check_learner(config.learner, inputs.model_path)
    else:
        _check_models(inputs.models, resumed)
    if needs_space and config.model.path is not None:
        from deploy.preflight.memory_check import predict_memory  # imports torch

        predict_memory(config)
    if needs_space and (address := config.deploy.checkpoint_address) is not None:
        RemoteFolder(address).check()
    if needs_space and Path(inputs.model_path).is_dir():
        checkpoints = None if resumed is None else resumed.checkpoints
        check_free_space(config, weight_shapes(inputs.model_path), folders, resumed=checkpoints)
    return inputs


def _load(config: RunConfig, resumed: RunDirectory | None) -> Inputs:
    """Import the user's code, find the models, and open the sources."""
    with _in_time(config):
        check_scoring(config)
    path = model_path(config, is_new=resumed is None)
    check_model(path)
    reward_models = reward_model_paths(config, is_new=resumed is None)
    teachers = teacher_paths(config)
    named = {"model": path, **{f"reward model {n}": p for n, p in enumerate(reward_models)}}
    named |= {f"teacher {number}": folder for number, folder in enumerate(teachers)}
    models = {name: fingerprint_of_model(folder) for name, folder in named.items()}
    begun = resumed.path if resumed is not None and resumed.ledger.exists() else None
    with _in_time(config):
        prompts = open_prompts(config, model_path=path, begun=begun)
    return Inputs(path, prompts, reward_models, teachers, models)


@_foreign_code()
def check_code(config: RunConfig) -> None:
    """Find all code that a recipe names, and check its options: `headway validate --strict`."""
    check_gpus(config, available=0)
    for teacher in teacher_paths(config):
        check_model(teacher)
    trackers.check(config.deploy.trackers)
    with _in_time(config):
        check_scoring(config)
        prompts = open_prompts(config)
    check_prompts(config, prompts)
    texts = frozenset(problem.text for problem in prompts.heldout)
    sft, prefer, learned, made = config.sft, config.prefer, config.reward_model, config.pairs
    kinds = [(DEMONSTRATIONS, part.source, part.options) for part in (sft.parts if sft else ())]
    if prefer:
        from learner.supervised.prefer import check_loss

        check_loss(prefer)
        kinds.append((PREFERENCES, prefer.pairs, prefer.options))
    if learned is not None:
        kind = LABELLED_STEPS if learned.kind == "process" else REWARD_MODEL_PAIRS
        kinds.append((kind, learned.pairs, learned.options))
    if sft and isinstance(sft.heldout, str):
        read_examples(HELDOUT_DEMONSTRATIONS, sft.heldout, sft.heldout_options)
    if config.heldout is not None:
        load_pair_judge("heldout.judge", config.heldout.judge)
    if made is not None:
        load_pair_judge("pairs.judge", made.judge)
        code = config.actors.code_execution
        load_rewards(made.rewards or (), options=config.actors.reward_options, code_execution=code)
    for kind, name, options in kinds:
        next(load_examples(kind, name, options=options, seed=config.seed, heldout=texts))
    check_objective(config)
