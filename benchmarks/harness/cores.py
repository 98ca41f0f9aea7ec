"""Chooses and checks the CPU cores of a comparison, whose runs must all have the same. Pure."""

from collections.abc import Iterable, Sequence

from deploy.cluster.cpu_affinity import learner_share, named_cores, reward_model_cores, share_out
from deploy.config.run_config import RunConfig
from headway.errors import InputError


def with_cores(config: RunConfig, available: Iterable[int]) -> RunConfig:
    """Return a recipe with `actors.cores` and `learner.cores` filled in where it has none.

    The learner gets its `learner_share` of the available cores, or the last where that is empty,
    and the engines share out all others. A recipe with GPUs, with several workers of an engine, or
    for another cluster is returned as it is.
    """
    actors, learner = config.actors, config.learner
    elsewhere = config.deploy.ray_address != "local"
    if elsewhere or actors.gpus or learner.gpus or actors.tensor_parallel_size > 1:
        return config
    every = sorted(available)
    of_learner = learner.cores
    if of_learner is None:
        of_learner = ",".join(map(str, learner_share(config, every) or every[-1:]))
    taken = named_cores(of_learner, reward_model_cores(actors))
    of_actors = actors.cores or share_out(actors.count, every, taken)
    return config.updated(actors={"cores": of_actors}, learner={"cores": of_learner})


def shareable(cores: Sequence[int], ranks: int) -> str:
    """Return the last of some cores, as many as ranks can share equally; all, if they are fewer."""
    unused = len(cores) % ranks if len(cores) > ranks else 0
    return ",".join(map(str, cores[unused:]))


def all_cores(config: RunConfig) -> str:
    """Return the cores of actors and learner; raises `InputError` if the recipe names none."""
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
    """Raise `InputError` for a recipe whose arms would not have equal devices."""
    if not on_gpus(config):
        all_cores(config)


def describe_devices(config: RunConfig) -> str:
    """Describe what actors and learner run on, for the terminal."""
    if on_gpus(config):
        return f"GPUs: {config.actors.gpus:g} an actor, {config.learner.gpus:g} a rank"
    engines = "; ".join(config.actors.cores or ())
    return f"cores: actors.cores {engines} · learner.cores {config.learner.cores}"
