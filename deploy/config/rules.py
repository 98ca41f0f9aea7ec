"""Rules between the sections of a recipe: what an objective, a source and a transport ask for.

Every check raises InputError or ValueError that names the settings, and what would do.
"""

from actors.config import ActorsConfig, PromptsConfig
from actors.shipped import REWARDS, SOURCES
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
    """Refuse a recipe whose rollouts are not what its objective needs."""
    _check_staleness(config, traits)
    learner, actors = config.learner, config.actors
    if config.queues.filter_tied and (reason := what_ties_teach(learner, traits)):
        raise InputError(dropping_refused("queues.filter_tied", reason))
    truncated = actors.top_p < 1 or actors.top_k > 0
    setting = behavior_comparison(learner, traits)
    by_rewards = learner.policy_weight > 0
    of_one_policy = by_rewards and traits.loss is not None and not traits.loss.off_policy
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
    if by_rewards and "group_size" in traits.needs and config.prompts.group_size < 2:
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
    """Refuse groups and batches that are too small for what the advantage compares."""
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
    queues, learner = config.queues, config.learner
    allowed = queues.allow_uncorrected or learner.policy_weight == 0
    if queues.bound == 0 or allowed or corrects_off_policyness(learner, traits):
        return
    ratio = (
        "learner.recompute_proximal = false"
        if learner.uses_proximal and learner.loss != "reinforce"
        else 'learner.loss = "cispo" or "ppo"'
    )
    raise InputError(
        f"queues.max_staleness = {queues.max_staleness} with learner.loss = {learner.loss!r} and "
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


def check_source(prompts: PromptsConfig, actors: ActorsConfig) -> None:
    """Refuse a source that never repeats prompts where it must, or that a reward cannot score."""
    entry, cap = SOURCES.get(prompts.source), prompts.pass_rate_cap
    if entry is None:
        return
    if cap is not None and entry.traits.endless:
        raise ValueError(
            f"prompts.pass_rate_cap = {cap} has no effect with prompts.source = "
            f'{prompts.source!r}, which always draws new problems; it is for "files", and for '
            "sources of your own that come back to theirs"
        )
    if prompts.curriculum is not None and prompts.curriculum.by is None and entry.traits.endless:
        raise ValueError(
            f"[prompts.curriculum] has no effect with prompts.source = {prompts.source!r}, which "
            "always draws new problems, none of which was measured; set prompts.curriculum.by to "
            "an entry of their metadata that comes again, such as a level"
        )
    libraries = {name: e.traits.library for name in REWARDS if (e := REWARDS.get(name)) is not None}
    for name in actors.reward:
        library = libraries.get(name)
        if library is not None and entry.traits.library is None:
            fitting = ", ".join(other for other, needed in libraries.items() if needed is None)
            raise ValueError(
                f'actors.reward = ["{name}"] scores problems of {library}:TASK alone, and '
                f"prompts.source = {prompts.source!r}; set actors.reward to one or more of "
                f'{fitting}, or to your own "module:function"'
            )


STAGED = '"shared_memory", "object_store" or "filesystem"'


def check_transport(config: RecipeKeys) -> None:
    """Refuse a transport that cannot work between learner and actors, or rounds an adapter."""
    weight_sync, placement = config.weight_sync, config.deploy.placement
    learner, actors, transport = config.learner, config.actors, config.weight_sync.transport
    if weight_sync.one_node and (placement.learner or placement.actors):
        role = "learner" if placement.learner else "actors"
        raise InputError(
            f"deploy.placement.{role} may put actors and learner on different nodes, and "
            f'weight_sync.transport = "{transport}" stays within a node; set it to '
            '"object_store" or "filesystem"'
        )
    if weight_sync.staged:
        if learner.lora is not None and weight_sync.wire_dtype != "as_trained":
            raise InputError(
                f'weight_sync.wire_dtype = "{weight_sync.wire_dtype}" would round the factors of '
                "[learner.lora], which alone are sent; leave it out"
            )
        return
    if actors.engine != "vllm":
        raise InputError(
            f'weight_sync.transport = "{transport}" is vLLM\'s own, and actors.engine = '
            f"{actors.engine!r}; set the transport to {STAGED}"
        )
    if not (learner.gpus and actors.gpus):
        raise InputError(
            f'weight_sync.transport = "{transport}" goes from a CUDA device of the learner to '
            f"those of the engines, and learner.gpus = {learner.gpus:g}, actors.gpus = "
            f"{actors.gpus:g}; give both a GPU, or set the transport to {STAGED}"
        )
    shares = learner.gpus + actors.count * actors.gpus
    if transport == "ipc" and (learner.ranks > 1 or shares > 1):
        raise InputError(
            'weight_sync.transport = "ipc" needs learner and engines on one GPU, and '
            f"learner.ranks = {learner.ranks}, learner.gpus = {learner.gpus:g} and "
            f"{actors.count} × actors.gpus = {actors.gpus:g} take {shares:g}; set one rank and "
            'shares that are at most 1 together, or weight_sync.transport = "nccl"'
        )
    if transport == "nccl" and (learner.gpus < 1 or actors.gpus < 1):
        raise InputError(
            'weight_sync.transport = "nccl" needs learner and engines on different GPUs, and '
            f"learner.gpus = {learner.gpus:g}, actors.gpus = {actors.gpus:g} may share one; set "
            'both to at least 1, or weight_sync.transport = "ipc"'
        )
