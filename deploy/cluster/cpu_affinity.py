"""Plans the CPU cores that the learner and each engine are bound to. Pure.

vLLM by itself would bind every engine to the first cores that it sees, the learner's included.
Engines with GPUs or with several workers are left to vLLM.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

from actors.config import ActorsConfig
from deploy.config.run_config import RunConfig
from headway.cpu_cores import parse_cores
from learner.config.learner import LearnerConfig
from learner.config.objective import ObjectiveConfig
from learner.config.supervised import SupervisedConfig


def learner_on_cores(config: RunConfig, available: Iterable[int]) -> RunConfig:
    """Fill in `learner.cores`, of this machine's, where a recipe names none; engines get the rest.

    A learner that gets some has as many threads.
    """
    actors, learner = config.actors, config.learner
    named = (actors.cores, learner.cores, learner.threads) != (None, None, None)
    on_gpu = actors.gpus > 0 or learner.gpus > 0
    if named or on_gpu or actors.engine != "vllm" or config.deploy.ray_address != "local":
        return config
    cores = learner_share(config, available)
    return config.updated(learner={"cores": ",".join(map(str, cores))}) if cores else config


def learner_of_stage(
    config: RunConfig, section: SupervisedConfig, available: Iterable[int]
) -> LearnerConfig:
    """Return a stage's settings as those of a learner, on the cores of one in its place.

    Torch's threads wait for one another by spinning: on all cores a small model trains several
    times slower where anything else runs.
    """
    alike = type(section).model_fields.keys() & LearnerConfig.model_fields.keys()
    alike -= ObjectiveConfig.model_fields.keys()  # a stage has losses of its own
    settings = {key: value for key in alike if (value := getattr(section, key)) is not None}
    learner = LearnerConfig(**settings, compile=False)
    devices = {"ranks": learner.ranks, "gpus": learner.gpus, "zero_node_ranks": None}
    placed = config.learner.model_copy(update=devices)
    placed = learner_on_cores(config.model_copy(update={"learner": placed}), available).learner
    threads = section.threads or placed.threads
    return learner.model_copy(update={"cores": placed.cores, "threads": threads})


def learner_share(config: RunConfig, available: Iterable[int]) -> list[int]:
    """Return the cores that are left to a learner: as many for each rank, or none.

    They are those that actors and reward models do not name; where actors name none, the last half
    of them, and no more than leaves the actors what they reserve.
    """
    actors = config.actors
    free = sorted(set(available) - named_cores(*(actors.cores or ()), reward_model_cores(actors)))
    count = len(free)
    if actors.cores is None:
        count = max(0, min(count // 2, count - math.ceil(actors.count * actors.cpus)))
    count -= count % config.learner.ranks
    return free[len(free) - count :]


def actors_on_cores(
    actors: ActorsConfig, available: Iterable[int], learner_cores: str | None
) -> ActorsConfig:
    """Fill in `actors.cores`, of those of the machine of all actors, where a recipe names none."""
    shares = actors.engine == "vllm" and actors.tensor_parallel_size == 1
    if not shares or actors.cores is not None or actors.gpus > 0:
        return actors
    taken = named_cores(learner_cores, reward_model_cores(actors))
    return actors.model_copy(update={"cores": share_out(actors.count, available, taken)})


def reward_model_cores(actors: ActorsConfig) -> str | None:
    """Return the cores that a recipe names for the reward models that it asks."""
    return actors.reward_model.cores if actors.asks_reward_models else None


def named_cores(*lists: str | None) -> set[int]:
    """Return the cores in any of some lists, such as "0,2-5"."""
    return {core for cores in lists if cores for core in parse_cores(cores)}


def share_out(count: int, available: Iterable[int], taken: set[int]) -> tuple[str, ...]:
    """Return a list of cores such as "2,3,8" for each of `count` engines.

    Neighbouring cores stay together, and sizes differ by one at most. Engines share cores only if
    there are fewer cores than engines; taken cores are used only if there are no others.
    """
    everything = sorted(set(available))
    free = [core for core in everything if core not in taken] or everything
    if len(free) < count:
        return tuple(str(free[index % len(free)]) for index in range(count))
    bounds = [index * len(free) // count for index in range(count + 1)]
    return tuple(",".join(map(str, free[begin:end])) for begin, end in pairwise(bounds))
