"""Chooses and checks the CPU cores of a comparison, whose runs must all have the same. Pure."""

from collections.abc import Iterable, Sequence
from math import ceil

from deploy.cluster.cpu_affinity import share_out
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from queues.runtime.cpu_affinity import parse_cores


def with_cores(config: RunConfig, available: Iterable[int]) -> RunConfig:
    """Return a recipe with `actors.cores` and `learner.cores` filled in where it has none.

    The learner gets the last half of the cores that nobody has, less what actors reserve of them,
    in a multiple of its ranks if there are more; the engines share out all others. A recipe with
    GPUs, with several workers of an engine, or for another cluster is returned as it is.

    Args:
        config: The recipe.
        available: Numbers of this machine's cores.
    """
    actors, learner = config.actors, config.learner
    elsewhere = config.deploy.ray_address != "local"
    if elsewhere or actors.gpus or learner.gpus or actors.tensor_parallel_size > 1:
        return config
    every = sorted(available)
    named = [*(actors.cores or ()), actors.reward_model.cores if actors.asks_reward_models else ""]
    taken = {core for cores in named if cores for core in parse_cores(cores)}
    of_learner = learner.cores
    if of_learner is None:
        free = [core for core in every if core not in taken] or every
        half = free if actors.cores else free[len(free) // 2 :]
        most = max(1, len(every) - ceil(actors.count * actors.cpus))
        of_learner = shareable(half[-most:], learner.ranks)
    of_actors = actors.cores or share_out(actors.count, every, taken | set(parse_cores(of_learner)))
    sections = {
        "actors": actors.model_copy(update={"cores": of_actors}),
        "learner": learner.model_copy(update={"cores": of_learner}),
    }
    return config.model_copy(update=sections)


def shareable(cores: Sequence[int], ranks: int) -> str:
    """Return the last of some cores, as many as ranks can share equally; all, if they are fewer."""
    unused = len(cores) % ranks if len(cores) > ranks else 0
    return ",".join(map(str, cores[unused:]))


def all_cores(config: RunConfig) -> str:
    """Return the cores of actors and learner together.

    Raises:
        InputError: The recipe does not name them.
    """
    if config.actors.cores is None or config.learner.cores is None:
        raise InputError(
            "a comparison at equal cores needs actors.cores and learner.cores in the recipe: they "
            'are chosen only where deploy.ray_address = "local", without GPUs and with one worker '
            "for each engine"
        )
    return ",".join([*config.actors.cores, config.learner.cores])


def on_gpus(config: RunConfig) -> bool:
    """Return True if actors and learner both have GPUs."""
    return bool(config.actors.gpus and config.learner.gpus)


def check_devices(config: RunConfig) -> None:
    """Raise `InputError` for a recipe whose variants would not have equal devices."""
    if not on_gpus(config):
        all_cores(config)


def describe_devices(config: RunConfig) -> str:
    """Describe what actors and learner run on, for the terminal."""
    if on_gpus(config):
        return f"GPUs: {config.actors.gpus:g} an actor, {config.learner.gpus:g} a rank"
    engines = "; ".join(config.actors.cores or ())
    return f"cores: actors.cores {engines} · learner.cores {config.learner.cores}"
