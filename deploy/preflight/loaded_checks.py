"""Checks of what a run was loaded from: each a function of one record, which raises InputError."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.config import ActorsConfig
from actors.engines.model_folder import context_length
from actors.engines.sampling_rules import check_sampling
from actors.environments.load_environment import load_environment
from actors.environments.single_turn import opening
from actors.reward_models.folder import check_reward_model
from actors.rewards import check_scorable, load_rewards
from actors.rollout.prompt_checks import check_fit
from deploy.config.rollout_rules import check_against_objective
from deploy.config.run_config import RunConfig
from deploy.planner.disk_space import check_free_space
from deploy.preflight.models import Shapes, check_adapter, check_examples, check_workers, find_model
from deploy.preflight.prompts import OpenedPrompts
from deploy.preflight.run_folders import check_run_folders
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import read_sessions
from headway.errors import HeadwayError, InputError
from queues.policy.prompt_retirement import split


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A recipe, and everything outside it that its run is made from."""

    config: RunConfig
    model_path: str
    shapes: Shapes | None
    """Shapes of the model's weights, by their names; None for a name on the hub."""
    prompts: OpenedPrompts
    reward_models: tuple[str, ...]
    fingerprints: Mapping[str, str]
    """Fingerprints of the initial weights and of the reward models, by their role."""
    resumed: RunDirectory | None
    """The run that goes on; None for a new one."""


def check_scoring(config: RunConfig) -> None:
    """Import rewards and environment, and check their options."""
    actors = config.actors
    for names in (actors.reward, scored_by(actors)):
        load_rewards(names, options=actors.reward_options, code_execution=actors.code_execution)
    load_environment(
        actors.environment, actors.environment_options, code_execution=actors.code_execution
    )


def scored_by(actors: ActorsConfig) -> tuple[str, ...]:
    """Return the rewards of held-out rollouts."""
    return actors.heldout_reward or actors.reward


def check_prompts(config: RunConfig, prompts: OpenedPrompts) -> None:
    """Refuse prompts that the rewards cannot score, or that could not be known again if retired."""
    if config.prompts.pass_rate_cap is not None:
        for prompt in prompts.first:
            split(prompt.prompt_id)
    check_scorable(config.actors.reward, [*prompts.first, *prompts.of_parts])
    check_scorable(scored_by(config.actors), prompts.problems)


def check_objective(config: RunConfig) -> None:
    """Compute the objective of two made-up rollouts; imports torch.

    Raises:
        InputError: The objective, which may be the user's, raised or does not fit the recipe.
    """
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


def _check_engine(loaded: Loaded) -> None:
    check_workers(loaded.config, loaded.model_path)
    if loaded.config.actors.engine == "vllm":
        check_sampling(loaded.model_path)


def _check_prompts(loaded: Loaded) -> None:
    check_prompts(loaded.config, loaded.prompts)


def _check_reward_models(loaded: Loaded) -> None:
    actors = loaded.config.actors
    for reward_model in loaded.reward_models:
        check_reward_model(
            reward_model,
            standardise=actors.reward_model.standardise,
            max_new_tokens=actors.max_new_tokens,
            max_model_len=actors.max_model_len or context_length(loaded.model_path),
            prompts=map(opening, loaded.prompts.sample),
            template_options=actors.chat_template_options,
        )


def check_space(loaded: Loaded) -> None:
    """Compare the free space of disks with what the run will write at least."""
    config, run = loaded.config, loaded.resumed
    if loaded.shapes is not None:
        checkpoints = None if run is None else run.checkpoints
        check_free_space(config, loaded.shapes, check_run_folders(config), resumed=checkpoints)


def _check_new_adapters(loaded: Loaded) -> None:
    learner, path = loaded.config.learner, loaded.model_path
    check_adapter(learner.lora, path, section="learner.lora", shapes=loaded.shapes)
    if (critic := learner.critic) is not None:
        own = find_model(critic.path, setting="learner.critic.path") if critic.path else path
        check_adapter(critic.lora, own, section="learner.critic.lora")


def _check_objective(loaded: Loaded) -> None:
    check_objective(loaded.config)


def _check_lengths(loaded: Loaded) -> None:
    check_fit(loaded.model_path, loaded.config.actors, loaded.prompts.sample)


def _check_examples(loaded: Loaded) -> None:
    check_examples(loaded.config)


def _check_same_models(loaded: Loaded) -> None:
    """Refuse to resume a run whose model folders have other content than in its last session.

    Raises:
        InputError: One differs; names its role.
    """
    if (run := loaded.resumed) is None:
        return
    sessions = read_sessions(run)
    before = sessions[-1].get("models", {}) if sessions else {}
    for name, fingerprint in loaded.fingerprints.items():
        if before.get(name, fingerprint) != fingerprint:
            raise InputError(
                f"the {name} of {run.path.name} is not that of its last session ({before[name]} "
                f"before, {fingerprint} now), and scores and KL would not be comparable; put it "
                "back, or start a run of its own"
            )


Check = Callable[[Loaded], None]
CHECKS: tuple[Check, ...] = (
    _check_engine,
    _check_prompts,
    _check_reward_models,
    _check_objective,
    _check_lengths,
)
"""Checks of every run."""
CHECKS_OF_NEW: tuple[Check, ...] = (_check_new_adapters, _check_examples)
"""Further checks of a run that begins."""
CHECKS_OF_RESUMED: tuple[Check, ...] = (_check_same_models,)
"""Further checks of a run that goes on."""
