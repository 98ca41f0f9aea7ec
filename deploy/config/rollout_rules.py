"""Rules of what an objective asks of queues, actors and prompts, as functions over its traits."""

from deploy.config.recipe_keys import RecipeKeys
from headway.errors import InputError
from learner.config.objective_rules import (
    behavior_comparison,
    corrects_off_policyness,
    dropping_refused,
    what_ties_teach,
)
from learner.config.traits import ObjectiveTraits

LEAST_RATE = 1e-5
"""Learning rate of an adapter below which it hardly changes."""


def check_against_objective(config: RecipeKeys, traits: ObjectiveTraits) -> None:
    """Refuse a recipe whose rollouts are not what its objective needs.

    Raises:
        InputError: Stale rollouts that nothing corrects, a truncated behaviour policy that a ratio
            compares with, groups of one that are compared, a baseline that nobody samples, or
            groups that are dropped although they teach something.
    """
    _check_staleness(config, traits)
    learner, actors = config.learner, config.actors
    if config.queues.filter_tied and (reason := what_ties_teach(learner, traits)):
        raise InputError(dropping_refused("queues.filter_tied", reason))
    truncated = actors.top_p < 1 or actors.top_k > 0
    setting = behavior_comparison(learner, traits)
    of_one_policy = traits.loss is not None and not traits.loss.off_policy
    if truncated and (setting or of_one_policy):
        use = (
            f"which learner.{setting} compares with"
            if setting
            else f"and learner.loss = {learner.loss!r} is of the whole one"
        )
        raise InputError(
            f"actors.top_p = {actors.top_p} and actors.top_k = {actors.top_k} renormalise the "
            f"behaviour policy, {use}; use top_p = 1.0 and top_k = -1, or the loss raft or dpo, "
            "which take rollouts of any policy"
        )
    if "group_size" in traits.needs and config.prompts.group_size < 2:
        setting = traits.needs["group_size"]
        raise InputError(
            f"learner.{setting} = {getattr(learner, setting)!r} compares the rollouts of a group, "
            f"so prompts.group_size must be at least 2, not {config.prompts.group_size}"
        )
    if "baseline_rewards" in traits.needs and not actors.greedy_baseline:
        raise InputError(
            f"learner.advantage = {learner.advantage!r} needs baseline_rewards, those of greedy "
            "rollouts of the same prompts; set actors.greedy_baseline = true"
        )


def check_batch(config: RecipeKeys) -> None:
    """Refuse groups and batches that are too small for what the advantage compares.

    Raises:
        InputError: Names the sizes, and what would do.
    """
    traits, prompts = config.learner.traits.advantage, config.prompts
    name, options = config.learner.advantage, config.learner.advantage_options
    if traits is None:
        return
    if traits.set_size is not None:
        option, default = traits.set_size
        size = options.get(option, default)
        if isinstance(size, int) and size >= prompts.group_size:
            raise InputError(
                f"learner.advantage_options.{option} = {size} must be below prompts.group_size = "
                f"{prompts.group_size}: the whole group is a single set, which says nothing of one "
                "rollout"
            )
    if traits.lone_rollout_with is not None:
        option, value = traits.lone_rollout_with
        alone = prompts.groups_per_batch * prompts.group_size < 2
        if alone and options.get(option) != value:
            raise InputError(
                f"learner.advantage = {name!r} compares the rollouts of a batch, so "
                "prompts.groups_per_batch times group_size must be at least 2, not 1; or set "
                f'learner.advantage_options = {{ {option} = "{value}" }}'
            )


def _check_staleness(config: RecipeKeys, traits: ObjectiveTraits) -> None:
    stale, learner = config.queues.max_staleness, config.learner
    if stale == 0 or config.queues.allow_uncorrected or corrects_off_policyness(learner, traits):
        return
    ratio = (
        "learner.recompute_proximal = false"
        if learner.uses_proximal and learner.loss != "reinforce"
        else 'learner.loss = "cispo" or "ppo"'
    )
    raise InputError(
        f"queues.max_staleness = {stale} with learner.loss = {learner.loss!r} and "
        f"learner.correction = {learner.correction!r} trains off-policy rollouts as if they were "
        f'on-policy; set learner.correction = "tis", or {ratio}, or queues.max_staleness = 0, or '
        "queues.allow_uncorrected = true"
    )


def hardly_trains(config: RecipeKeys) -> list[str]:
    """List the settings of a recipe with which an adapter hardly changes."""
    learner = config.learner
    if learner.lora is None or learner.learning_rate >= LEAST_RATE:
        return []
    return [
        f"learner.learning_rate = {learner.learning_rate:g}: an adapter hardly changes with less "
        f"than {LEAST_RATE:g}, and takes about ten times the rate of whole weights"
    ]
