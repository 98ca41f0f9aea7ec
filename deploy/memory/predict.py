"""Predicts the memory of a run, and refuses one that cannot fit, with the setting that helps.

recipe ─▶ measure (the only part that needs torch) ─▶ processes ─▶ nodes, GPUs, disk ─▶ lacks
                ▲                                                                        │
                └────────── the same with one setting changed, until it fits ◀───────────┘
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from deploy.config.devices import left_on_cards
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.memory.processes import (
    DRIVER_BASE,
    GIB,
    EngineSizes,
    ModelSizes,
    Process,
    engine,
    learner_rank,
    total,
    wire_bytes,
)
from deploy.preflight.disk_space import TOKEN_BYTES, parameter_bytes, stepped_bytes

MOST_CHANGES = 8
"""Settings that are changed one after the other before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all models of a recipe under its settings."""

    policy: ModelSizes
    critic: ModelSizes | None
    served: EngineSizes


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
    """Those on one such node, with their number there as `count`."""
    parts: dict[str, float]
    """Bytes of host memory, by what they hold."""


class Lack(NamedTuple):
    """Memory that is too small."""

    role: str
    """The role whose settings help."""
    text: str
    excess: float
    """Bytes needed beyond those that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The memory of a run by process and node, and its disk."""

    processes: tuple[Process, ...]
    nodes: tuple[Node, ...]
    checkpoints: float
    """Bytes of the checkpoints that exist at a time."""
    journal: float
    """Bytes of the journal at the end, at most."""
    lacks: tuple["Lack", ...]
    """What does not fit."""


def predict(config: RunConfig, sizes: Sizes, capacity: Capacity) -> Prediction:
    """Predict the memory of a run; what is not known of the capacity is not compared."""
    rank = learner_rank(config, sizes.policy, sizes.critic)
    actor = engine(config, sizes.policy, sizes.served, capacity.gpu)
    nodes = tuple(_nodes(config, rank, actor, capacity.gpus, wire_bytes(config, sizes.policy)))
    learner, prompts = config.learner, config.prompts
    kept = config.steps if config.queues.keep_rollouts == "all" else learner.checkpoint_every
    rollouts = min(kept, config.steps) * prompts.groups_per_batch * prompts.group_size
    saves = math.ceil(config.steps / learner.checkpoint_every)
    sections = (learner.lora, sizes.policy), (learner.critic and learner.critic.lora, sizes.critic)
    adapted = sum(model.trained for lora, model in sections if lora and model)
    return Prediction(
        processes=(rank, actor),
        nodes=nodes,
        checkpoints=min(saves, learner.keep_checkpoints + 1)
        * float(
            parameter_bytes(learner) * sizes.policy.parameters + stepped_bytes(learner) * adapted
        ),
        journal=float(TOKEN_BYTES * rollouts * config.actors.max_new_tokens),
        lacks=tuple(_lacks(nodes, sizes.served, capacity)),
    )


def _nodes(
    config: RunConfig, rank: Process, actor: Process, gpus: int | None, version: float
) -> Iterator[Node]:
    """Yield the nodes of a run; actors are on the learner's node where weights cannot leave it.

    Published versions lie in shared memory: two on each node, while one follows another, and a copy
    of the newest in Ray's object store if it travels by that.
    """
    versions = 3 if config.weight_sync.transport == "object_store" else 2
    published = {"published versions": versions * version if config.weight_sync.staged else 0.0}
    driver = {"driver, broker": float(DRIVER_BASE)}
    local = config.deploy.ray_address == "local"
    if local or (config.weight_sync.one_node and config.deploy.placement.actors is None):
        together = (rank, actor)
        yield Node("node", together, driver | _hosts(together) | published)
        return
    learners = (_on_a_node(rank, gpus),)
    yield Node("learner's node", learners, driver | _hosts(learners) | published)
    actors = (_on_a_node(actor, gpus),)
    yield Node("actors' node", actors, _hosts(actors) | published)


def _on_a_node(process: Process, gpus: int | None) -> Process:
    """Return a process with the number of them that one node has GPUs for."""
    if gpus is None or not process.gpus:
        return process
    most = int(gpus / process.gpus) if process.gpus >= 1 else gpus * int(1 / process.gpus)
    return replace(process, count=min(process.count, max(1, most)))


def _hosts(processes: tuple[Process, ...]) -> dict[str, float]:
    return {
        f"{one.count} × {one.role}": one.count * total(one.host) + total(one.first)
        for one in processes
    }


def _lacks(nodes: tuple[Node, ...], served: EngineSizes, capacity: Capacity) -> Iterator[Lack]:
    for node in nodes:
        if capacity.host is not None and (needed := total(node.parts)) > capacity.host:
            largest = max(node.processes, key=lambda one: one.count * total(one.host))
            yield Lack(
                largest.role,
                f"the {node.name} has {gib(capacity.host)} GiB of memory, and needs "
                f"{gib(needed)}: {described(node.parts)}",
                needed - capacity.host,
            )
        shares = [one.gpus for one in node.processes if 0 < one.gpus < 1 for _ in range(one.count)]
        gpus = sum(one.count * one.gpus for one in node.processes if one.gpus >= 1)
        gpus += len(left_on_cards(shares))
        if capacity.gpus is not None and gpus > capacity.gpus:
            most = max(node.processes, key=lambda one: one.count * one.gpus)
            yield Lack(
                most.role,
                f"the {node.name} has {capacity.gpus} GPUs, and needs {gpus:g}",
                (gpus - capacity.gpus) * (capacity.gpu or GIB),
            )
        if capacity.gpu is None:
            continue
        for process in node.processes:
            if (needed := total(process.device)) > capacity.gpu:
                yield Lack(
                    process.role,
                    f"a GPU of the {process.role} has {gib(capacity.gpu)} GiB, and needs "
                    f"{gib(needed)}: {described(process.device)}",
                    needed - capacity.gpu,
                )
        sharing = [one for one in node.processes if 0 < one.gpus < 1]
        needed = sum(total(one.device) for one in sharing)
        if len(sharing) > 1 and needed > capacity.gpu:
            roles = " and ".join(one.role for one in sharing)
            yield Lack(
                sharing[0].role,
                f"{roles} share a GPU of {gib(capacity.gpu)} GiB, and need {gib(needed)}",
                needed - capacity.gpu,
            )


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / GIB:.1f}"


def described(parts: Any) -> str:
    """Format the parts of at least 0.05 GiB, the largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size >= GIB / 20)


def remedies(
    config: RunConfig, role: str, longest: int
) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Yield settings that lower the memory of a role, the cheapest first, each with the recipe."""
    learner, actors = config.learner, config.actors
    half, workers = learner.microbatch_tokens // 2, 2 * actors.tensor_parallel_size
    shards = learner.zero_stage > 0 and learner.optimizer == "adamw"
    options: dict[str, list[tuple[bool, str, dict[str, Any]]]] = {
        "learner": [
            (not learner.activation_checkpointing, "learner", {"activation_checkpointing": True}),
            (half >= longest, "learner", {"microbatch_tokens": half}),
            (
                shards and learner.ranks > 1 and learner.zero_stage < 3,
                "learner",
                {"zero_stage": learner.zero_stage + 1},
            ),
            (
                shards and learner.gpus > 0,
                "learner",
                {"offload_optimizer": not learner.offload_optimizer},
            ),
            (
                0 < learner.gpus < 1,
                "actors",
                {"gpu_memory_utilization": round(actors.gpu_memory_share / 2, 3)},
            ),
        ],
        "actor": [
            (actors.gpus > 0, "actors", {"tensor_parallel_size": workers, "gpus": float(workers)}),
            (not actors.gpus, "actors", {"kv_cache_gib": 1.0}),
            (actors.count > 1, "actors", {"count": actors.count // 2}),
        ],
    }
    for applies, section, settings in options[role]:
        if applies:
            changed = getattr(config, section).model_copy(update=settings)
            named = {f"{section}.{name}": value for name, value in settings.items()}
            yield named, config.model_copy(update={section: changed})


def refuse(
    config: RunConfig,
    prediction: Prediction,
    measure: Callable[[RunConfig], Sizes],
    capacity: Capacity,
    longest: int,
) -> None:
    """Refuse a run that cannot fit, naming settings with which it does.

    For what lacks first, each setting is tried alone; if none is enough, the best one is kept.

    Raises:
        InputError: It cannot fit.
    """
    if not prediction.lacks:
        return
    lacks = prediction.lacks
    settings: dict[str, Any] = {}
    texts = [lack.text for lack in lacks]
    for _ in range(MOST_CHANGES):
        role = lacks[0].role
        tried = [
            (more, changed, predict(changed, measure(changed), capacity).lacks)
            for more, changed in remedies(config, role, longest)
        ]
        enough = [option for option in tried if role not in {lack.role for lack in option[2]}]
        if not tried:
            break
        best = min(tried, key=lambda option: sum(lack.excess for lack in option[2]))
        more, config, lacks = enough[0] if enough else best
        settings |= more
        if not lacks:
            break
    named = ", ".join(f"{name} = {toml_value(value)}" for name, value in settings.items())
    help_ = f"set {named}, with which it fits"
    if lacks:
        help_ = "no setting that was tried helps: take more or larger GPUs, or a smaller model"
    raise InputError("\n".join(["the run does not fit into memory:", *texts, help_]))
