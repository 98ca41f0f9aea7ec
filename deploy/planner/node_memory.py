"""Memory and disk of a run by process and node, and what of it does not fit. Pure.

recipe ─▶ model sizes (the only part that computes) ─▶ processes ─▶ nodes, GPUs, disk ─▶ lacks
                ▲                                                                           │
                └── the same with one setting changed, until it fits (remedies) ◀───────────┘
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from deploy.config.devices import EPSILON, left_on_cards
from deploy.config.run_config import RunConfig
from deploy.planner.byte_counts import (
    GIB,
    checkpoint_bytes,
    journal_bytes,
    most_checkpoints,
    version_bytes,
)
from deploy.planner.model_sizes import Sizes
from deploy.planner.process_memory import (
    DRIVER_BASE,
    Parts,
    Process,
    counted,
    engine,
    learner_rank,
    total,
)
from headway.roles import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The memory of each node and of each GPU in bytes; None where it is not known."""

    gpus: int | None = None
    gpu: float | None = None
    host: float | None = None


class Node(NamedTuple):
    """The nodes of one kind."""

    name: str
    processes: tuple[Process, ...]
    """Processes on one such node, with their number there as `count`."""
    parts: dict[str, float]
    """Bytes of host memory, by what they hold."""


class Lack(NamedTuple):
    """Memory that is too small."""

    role: Role
    """The role whose settings help."""
    text: str
    excess: float
    """Bytes needed beyond those that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The memory of a run by process and node, and its disk."""

    capacity: Capacity
    processes: tuple[Process, ...]
    nodes: tuple[Node, ...]
    checkpoints: float
    """Bytes of the checkpoints that exist at a time."""
    journal: float
    """Bytes of the journal at the end, at most."""
    lacks: tuple[Lack, ...]
    """Memory that is too small, as far as the capacity is known."""
    version: float
    """Bytes of a version of the weights that is sent to engines."""
    receivers: int
    """Nodes with engines that versions come to from another node."""


def predict(config: RunConfig, sizes: Sizes, capacity: Capacity) -> Prediction:
    """Predict the memory of a run; what is not known of the capacity is not compared."""
    rank = learner_rank(config, sizes, capacity.gpu)
    actor = engine(config, sizes.policy, sizes.served, capacity.gpu)
    version = version_bytes(config, sizes.policy.parameters, sizes.policy.trained)
    nodes = tuple(_nodes(config, rank, actor, capacity.gpus, version))
    learner = config.learner
    sections = (learner.lora, sizes.policy), (learner.critic and learner.critic.lora, sizes.critic)
    adapters = sum(model.trained for lora, model in sections if lora and model)
    checkpoint = checkpoint_bytes(learner, sizes.policy.parameters, adapters)
    kept = config.steps if config.queues.keep_rollouts == "all" else learner.checkpoint_every
    return Prediction(
        capacity=capacity,
        processes=(rank, actor),
        nodes=nodes,
        checkpoints=float(most_checkpoints(config) * checkpoint),
        journal=float(journal_bytes(config, min(kept, config.steps))),
        lacks=tuple(_lacks(nodes, capacity)),
        version=float(version),
        receivers=_receivers(nodes, config.actors.count),
    )


def _receivers(nodes: tuple[Node, ...], engines: int) -> int:
    """Return the number of nodes without the learner that so many engines are on."""
    first, *others = nodes
    beside = sum(process.count for process in first.processes if process.role is Role.ACTOR)
    return sum(math.ceil((engines - beside) / node.processes[0].count) for node in others)


def _nodes(
    config: RunConfig, rank: Process, actor: Process, gpus: int | None, version: float
) -> Iterator[Node]:
    """Yield the nodes of a run; actors are on the learner's node where weights cannot leave it.

    Without a placement of their own they may also take the GPUs that the learner leaves there.
    Published versions lie in shared memory: two on each node, while one follows another, and a copy
    of the newest in Ray's object store if it travels by that.
    """
    versions = 3 if config.weight_sync.transport == "object_store" else 2
    published = {"published versions": versions * version if config.weight_sync.staged else 0.0}
    driver = {"driver, standby, broker": float(DRIVER_BASE), **published}
    local = config.deploy.ray_address == "local"
    if local or (config.weight_sync.one_node and config.deploy.placement.actors is None):
        yield _node("node", (rank, actor), driver)
        return
    learners: tuple[Process, ...] = (_on_a_node(rank, gpus),)
    if config.deploy.placement.actors is None and gpus is not None and actor.gpus:
        free = gpus - learners[0].count * learners[0].gpus
        if engines := min(actor.count, int((free + EPSILON) / actor.gpus)):
            learners += (replace(actor, count=engines),)
    yield _node("learner's node", learners, driver)
    yield _node("actors' node", (_on_a_node(actor, gpus),), published)


def _node(name: str, processes: tuple[Process, ...], shared: Parts) -> Node:
    """Return nodes with processes, and with bytes that lie there once."""
    own = {
        f"{process.count} × {process.role}": process.count * total(process.host)
        + total(process.first)
        for process in processes
    }
    return Node(name, processes, {**own, **shared})


def _on_a_node(process: Process, gpus: int | None) -> Process:
    """Return a process with the number of them that one node has GPUs for."""
    if gpus is None or not process.gpus:
        return process
    most = int(gpus / process.gpus) if process.gpus >= 1 else gpus * int(1 / process.gpus)
    return replace(process, count=min(process.count, max(1, most)))


def _lacks(nodes: tuple[Node, ...], capacity: Capacity) -> Iterator[Lack]:
    for node in nodes:
        if capacity.host is not None and (needed := total(node.parts)) > capacity.host:
            largest = max(node.processes, key=lambda process: process.count * total(process.host))
            text = f"the {node.name} has {gib(capacity.host)} GiB of memory, and needs "
            text += f"{gib(needed)}: {described(node.parts)}"
            yield Lack(largest.role, text, needed - capacity.host)
        if capacity.gpus is not None and (cards := _gpus(node.processes)) > capacity.gpus:
            most = max(node.processes, key=lambda process: process.count * process.gpus)
            text = f"the {node.name} has {counted(capacity.gpus, 'GPU')}, and needs {cards:g}"
            yield Lack(most.role, text, (cards - capacity.gpus) * (capacity.gpu or GIB))
        if capacity.gpu is not None:
            for process in node.processes:
                yield from _lacks_of_a_gpu(process, capacity.gpu)
            yield from _lacks_of_a_shared_gpu(node.processes, capacity.gpu)


def _gpus(processes: tuple[Process, ...]) -> float:
    """Return the number of GPUs that processes take; a share of one lies on one."""
    shares = [process.share for process in processes if process.share for _ in range(process.count)]
    whole = sum(process.count * process.gpus for process in processes if not process.share)
    return whole + len(left_on_cards(shares))


def _lacks_of_a_gpu(process: Process, gpu: float) -> Iterator[Lack]:
    needed, least = total(process.device), total(process.least)
    if needed > gpu:
        text = f"a GPU of the {process.role} has {gib(gpu)} GiB, and needs {gib(needed)}: "
        yield Lack(process.role, text + described(process.device), needed - gpu)
    elif process.limit is not None and least > process.limit:
        text = f"an engine may take {gib(process.limit)} GiB of each GPU "
        text += f"(actors.gpu_memory_utilization), and needs {gib(least)}: "
        yield Lack(process.role, text + described(process.least), least - process.limit)


def _lacks_of_a_shared_gpu(processes: tuple[Process, ...], gpu: float) -> Iterator[Lack]:
    for sharing in on_one_gpu(processes):
        needed = sum(process.count * total(process.device) for process in sharing)
        if sum(process.count for process in sharing) > 1 and needed > gpu:
            roles = " and ".join(
                process.role if process.count == 1 else f"{process.count} × {process.role}"
                for process in sharing
            )
            text = f"{roles} share a GPU of {gib(gpu)} GiB, and need {gib(needed)}"
            yield Lack(sharing[0].role, text, needed - gpu)


def on_one_gpu(processes: tuple[Process, ...]) -> Iterator[list[Process]]:
    """Yield the processes that share a GPU of a node, with their number on it as `count`.

    The learner's GPU has as many engines as its rest holds; others share GPUs of their own.
    """
    sharing = {process.role: process for process in processes if process.share}
    learners = [sharing[Role.LEARNER]] if Role.LEARNER in sharing else []
    if actor := sharing.get(Role.ACTOR):
        left = actor.count
        for others in [learners, []] if learners else [[]]:
            free = 1 - sum(process.gpus for process in others)
            beside = min(left, int((free + EPSILON) / actor.gpus))
            left -= beside
            if beside:
                yield [*others, replace(actor, count=beside)]


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / GIB:.1f}"


def described(parts: Parts) -> str:
    """Format the parts of at least 0.05 GiB, the largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size >= GIB / 20)
