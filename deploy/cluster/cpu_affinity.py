"""Plans the CPU cores that the learner and each engine are bound to. Pure.

vLLM by itself would bind every engine to the first cores that it sees, the learner's included.
Engines with GPUs or with several workers are left to vLLM.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

from actors.config import ActorsConfig
from deploy.config.run_config import RunConfig
from queues.runtime.cpu_affinity import parse_cores


def learner_on_cores(config: RunConfig, available: Iterable[int]) -> RunConfig:
    """Return a recipe that names no cores with `learner.cores` filled in; engines get the others.

    A learner without GPUs takes the last half of the `available` cores of this machine, less what
    the actors reserve of it, and as many threads.
    """
    actors, learner, cores = config.actors, config.learner, sorted(set(available))
    named = (actors.cores, learner.cores, learner.threads) != (None, None, None)
    on_gpu = actors.gpus > 0 or learner.gpus > 0
    if named or on_gpu or actors.engine != "vllm" or config.deploy.ray_address != "local":
        return config
    reserved = math.ceil(actors.count * actors.cpus)
    count = min(len(cores) // 2, len(cores) - reserved)
    count -= count % learner.ranks
    if count < 1:
        return config
    text = ",".join(map(str, cores[-count:]))
    return config.model_copy(update={"learner": learner.model_copy(update={"cores": text})})


def actors_on_cores(
    actors: ActorsConfig, available: Iterable[int], learner_cores: str | None
) -> ActorsConfig:
    """Return the section `[actors]` with `cores` filled in where the recipe leaves it open.

    `available` are the cores of the machine that all actors run on.
    """
    shares = actors.engine == "vllm" and actors.tensor_parallel_size == 1
    if not shares or actors.cores is not None or actors.gpus > 0:
        return actors
    reward_model_cores = actors.reward_model.cores if actors.asks_reward_models else None
    others = ",".join(filter(None, [learner_cores, reward_model_cores]))
    taken = set(parse_cores(others)) if others else set()
    return actors.model_copy(update={"cores": share_out(actors.count, available, taken)})


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
