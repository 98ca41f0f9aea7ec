"""Which CPU cores each engine is bound to: pure planning.

vLLM by itself would bind every engine to the first cores that it sees, the learner's included.
Leaves out GPUs, and several sockets for one engine.
"""

from collections.abc import Iterable
from itertools import pairwise

from actors.config import ActorsConfig
from queues.runtime.cpu_affinity import parse_cores


def actors_on_cores(actors: ActorsConfig, there: Iterable[int], taken: set[int]) -> ActorsConfig:
    """The section `[actors]` with `cores` filled in where the recipe leaves them open.

    Args:
        actors: The section.
        there: Cores of the machine that all actors run on.
        taken: The learner's; those of the reward models, where they are asked, are taken too.
    """
    shares = actors.engine == "vllm" and actors.tensor_parallel_size == 1
    if not shares or actors.cores is not None or actors.gpus > 0:
        return actors
    judges = actors.reward_model.cores if actors.asks_reward_models else None
    others = taken | set(parse_cores(judges) if judges else ())
    return actors.model_copy(update={"cores": share_out(actors.count, there, others)})


def share_out(count: int, there: Iterable[int], taken: set[int]) -> tuple[str, ...]:
    """A list of cores such as "2-5,8" for each of `count` engines.

    Neighbours stay together, sizes differ by one at most. Engines share cores only where there are
    fewer cores than engines; cores that are taken are used only where there are no others.
    """
    everything = sorted(set(there))
    free = [core for core in everything if core not in taken] or everything
    if len(free) < count:
        return tuple(str(free[index % len(free)]) for index in range(count))
    bounds = [index * len(free) // count for index in range(count + 1)]
    return tuple(_ranges(free[begin:end]) for begin, end in pairwise(bounds))


def _ranges(cores: list[int]) -> str:
    """Ascending cores as text: runs of neighbours as "2-5"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
