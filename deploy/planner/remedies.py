"""Settings with which a run that does not fit into memory fits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from actors.config import ActorsConfig
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from deploy.planner.model_sizes import Sizes
from deploy.planner.node_memory import Capacity, Lack, Prediction, predict
from headway.errors import InputError
from headway.roles import Role
from learner.config.learner import LearnerConfig

Settings = dict[str, Any]
"""Values by the names of keys."""
Change = tuple[str, Settings]
"""A section of a recipe, and keys in it."""
MOST_CHANGES = 8
"""Settings that are changed one after the other before it is given up."""


def remedies(
    config: RunConfig, role: Role, sizes: Sizes, gpus: int
) -> Iterator[tuple[Settings, RunConfig]]:
    """Yield settings that lower the memory of a role, the cheapest first, each with its recipe."""
    actors, share = config.actors, config.actors.gpu_memory_share
    most = 0.9 * (actors.gpus if 0 < actors.gpus < 1 else 1.0)
    larger = [more for more in (most, 2 * share, 1.5 * share, 1.25 * share) if share < more <= most]
    shares = [*(larger if role is Role.ACTOR else ()), 0.75 * share, 0.5 * share]
    changes: list[Change] = [
        ("actors", {"gpu_memory_utilization": round(value, 3)})
        for value in shares
        if actors.gpus > 0
    ]
    if role is Role.LEARNER:
        changes = [*_learner_changes(config.learner, sizes.longest, gpus), *changes]
    else:
        changes += _engine_changes(actors, sizes.served.workers)
    for section, change in changes:
        changed = getattr(config, section).model_copy(update=change)
        named = {f"{section}.{name}": value for name, value in change.items()}
        yield named, config.model_copy(update={section: changed})


def _learner_changes(learner: LearnerConfig, longest: int, gpus: int) -> Iterator[Change]:
    if not learner.activation_checkpointing:
        yield "learner", {"activation_checkpointing": True}
    for part in (2, 4, 8):
        if (tokens := learner.microbatch_tokens // part) >= longest:
            yield "learner", {"microbatch_tokens": tokens}
    if learner.zero_stage == 0 or learner.optimizer != "adamw":
        return
    if learner.ranks > 1 and learner.zero_stage < 3:
        yield "learner", {"zero_stage": learner.zero_stage + 1}
    for ranks in (2 * learner.ranks, 4 * learner.ranks):
        if learner.gpus == 1 and ranks <= gpus:
            yield "learner", {"ranks": ranks}
    if learner.gpus > 0:
        yield "learner", {"offload_optimizer": not learner.offload_optimizer}


def _engine_changes(actors: ActorsConfig, workers: Sequence[int]) -> Iterator[Change]:
    if actors.gpus == 0:
        yield "actors", {"kv_cache_gib": 1.0}
    for size in workers:
        if actors.gpus not in (0, size):
            yield "actors", {"tensor_parallel_size": size, "gpus": float(size)}
    if actors.count > 1:
        yield "actors", {"count": actors.count // 2}


def _excess(prediction: Prediction) -> float:
    return sum(lack.excess for lack in prediction.lacks)


def fitted(
    config: RunConfig, measure: Callable[[RunConfig], Sizes], capacity: Capacity
) -> tuple[Settings, Prediction, tuple[Lack, ...]]:
    """Return settings with which a run fits into memory, its prediction, and what lacks without.

    `measure` returns the sizes for a recipe. The prediction is the one with the settings, and has
    lacks where none help. Where none would if passes and the KV cache took no memory, which other
    recipes are measured for, it is that of the recipe as it is.
    """
    sizes = measure(config)
    prediction = predict(config, sizes, capacity)
    if not prediction.lacks:
        return {}, prediction, ()
    policy = replace(sizes.policy, activations=0, passing=0)
    critic = sizes.critic and replace(sizes.critic, activations=0, passing=0)
    served = replace(sizes.served, cpu_cache=0)
    least = replace(sizes, policy=policy, critic=critic, served=served)
    if _changed(config, least, lambda _: least, capacity)[1].lacks:
        return {}, prediction, prediction.lacks
    return *_changed(config, sizes, measure, capacity), prediction.lacks


def _changed(
    config: RunConfig, sizes: Sizes, measure: Callable[[RunConfig], Sizes], capacity: Capacity
) -> tuple[Settings, Prediction]:
    """Return settings with which a run of such `sizes` lacks least, and its prediction with them.

    For what lacks first, each setting is tried alone; if none is enough, the best one is kept.
    """
    settings, prediction = Settings(), predict(config, sizes, capacity)
    for _ in range(MOST_CHANGES):
        if not prediction.lacks:
            break
        role = prediction.lacks[0].role
        others = {lack.role for lack in prediction.lacks} - {role}
        tried: list[tuple[Settings, RunConfig, Prediction]] = []
        for more, changed in remedies(config, role, sizes, capacity.gpus or 0):
            tried.append((more, changed, predict(changed, measure(changed), capacity)))
            if {lack.role for lack in tried[-1][2].lacks} <= others:
                tried = tried[-1:]
                break
        else:
            tried = [x for x in tried if _excess(x[2]) < _excess(prediction)]
        if not tried:
            break
        more, config, prediction = min(tried, key=lambda option: _excess(option[2]))
        settings |= more
    return settings, prediction


def fitting(
    config: RunConfig, measure: Callable[[RunConfig], Sizes], capacity: Capacity
) -> Prediction:
    """Predict the memory of a run that fits, by sizes that `measure` returns for a recipe.

    Raises InputError for another run, and names settings with which it fits.
    """
    settings, prediction, lacks = fitted(config, measure, capacity)
    if not lacks:
        return prediction
    named = ", ".join(f"{name} = {toml_value(value)}" for name, value in settings.items())
    help_ = f"set {named}, with which it fits"
    if prediction.lacks:
        help_ = "no setting that was tried helps: take more or larger GPUs, or a smaller model"
    raise InputError(
        "\n".join(["the run does not fit into memory:", *(x.text for x in lacks), help_])
    )
