"""Predicts the memory of a run, and refuses one that cannot fit, with the setting that helps.

recipe ─▶ measure (the only part that needs torch) ─▶ processes ─▶ nodes, GPUs, disk ─▶ lacks
                ▲                                                                        │
                └────────── the same with one setting changed, until it fits ◀───────────┘
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from deploy.config.devices import left_on_cards
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from deploy.memory.processes import (
    DRIVER_BASE,
    GIB,
    EngineSizes,
    ModelSizes,
    Process,
    counted,
    engine,
    learner_rank,
    total,
    wire_bytes,
)
from deploy.preflight.disk_space import TOKEN_BYTES, parameter_bytes, stepped_bytes
from headway.errors import InputError

EPSILON = 1e-6
"""Rounding of shares of a GPU."""
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

    Without a placement of their own they may also take the GPUs that the learner leaves there.

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
    learners: tuple[Process, ...] = (_on_a_node(rank, gpus),)
    if config.deploy.placement.actors is None and gpus is not None and actor.gpus:
        free = gpus - learners[0].count * learners[0].gpus
        if engines := min(actor.count, int((free + EPSILON) / actor.gpus)):
            learners += (replace(actor, count=engines),)
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
                f"the {node.name} has {counted(capacity.gpus, 'GPU')}, and needs {gpus:g}",
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
            elif process.limit is not None and (needed := total(process.least)) > process.limit:
                yield Lack(
                    process.role,
                    f"an engine may take {gib(process.limit)} GiB of each GPU "
                    f"(actors.gpu_memory_utilization), and needs {gib(needed)}: "
                    f"{described(process.least)}",
                    needed - process.limit,
                )
        for sharing in on_one_gpu(node.processes):
            needed = sum(one.count * total(one.device) for one in sharing)
            if sum(one.count for one in sharing) > 1 and needed > capacity.gpu:
                roles = " and ".join(
                    one.role if one.count == 1 else f"{one.count} × {one.role}" for one in sharing
                )
                yield Lack(
                    sharing[0].role,
                    f"{roles} share a GPU of {gib(capacity.gpu)} GiB, and need {gib(needed)}",
                    needed - capacity.gpu,
                )


def on_one_gpu(processes: tuple[Process, ...]) -> Iterator[list[Process]]:
    """Yield the processes that share a GPU of a node, with their number on it as `count`.

    The learner's GPU has as many engines as its rest holds; others share GPUs of their own.
    """
    learners = [one for one in processes if one.role == "learner" and 0 < one.gpus < 1]
    for engine_ in (one for one in processes if one.role == "actor" and 0 < one.gpus < 1):
        left = engine_.count
        for others in [learners, []] if learners else [[]]:
            free = 1 - sum(one.gpus for one in others)
            beside = min(left, int((free + EPSILON) / engine_.gpus))
            left -= beside
            if beside:
                yield [*others, replace(engine_, count=beside)]


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / GIB:.1f}"


def described(parts: Any) -> str:
    """Format the parts of at least 0.05 GiB, the largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size >= GIB / 20)


def remedies(
    config: RunConfig, role: str, longest: int, workers: Sequence[int], gpus: int = 0
) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Yield settings that lower the memory of a role, the cheapest first, each with the recipe.

    `workers` are the values that `actors.tensor_parallel_size` may have, `gpus` the number of a
    node's.
    """
    learner, actors = config.learner, config.actors
    share, most = actors.gpu_memory_share, 0.9 * (actors.gpus if 0 < actors.gpus < 1 else 1.0)
    shards = learner.zero_stage > 0 and learner.optimizer == "adamw"
    less = [
        (actors.gpus > 0, "actors", {"gpu_memory_utilization": round(part * share, 3)})
        for part in (0.75, 0.5)
    ]
    options: dict[str, list[tuple[bool, str, dict[str, Any]]]] = {
        "learner": [
            (not learner.activation_checkpointing, "learner", {"activation_checkpointing": True}),
            *(
                (tokens >= longest, "learner", {"microbatch_tokens": tokens})
                for tokens in (learner.microbatch_tokens // part for part in (2, 4, 8))
            ),
            (
                shards and learner.ranks > 1 and learner.zero_stage < 3,
                "learner",
                {"zero_stage": learner.zero_stage + 1},
            ),
            *(
                (shards and learner.gpus == 1 and ranks <= gpus, "learner", {"ranks": ranks})
                for ranks in (2 * learner.ranks, 4 * learner.ranks)
            ),
            (
                shards and learner.gpus > 0,
                "learner",
                {"offload_optimizer": not learner.offload_optimizer},
            ),
            *less,
        ],
        "actor": [
            *(
                (
                    actors.gpus > 0 and share < more <= most,
                    "actors",
                    {"gpu_memory_utilization": round(more, 3)},
                )
                for more in (most, 2 * share, 1.5 * share, 1.25 * share)
            ),
            *less,
            *(
                (actors.gpus > 0, "actors", {"tensor_parallel_size": size, "gpus": float(size)})
                for size in workers
                if size != actors.gpus
            ),
            (not actors.gpus, "actors", {"kv_cache_gib": 1.0}),
            (actors.count > 1, "actors", {"count": actors.count // 2}),
        ],
    }
    for applies, section, settings in options[role]:
        if applies:
            changed = getattr(config, section).model_copy(update=settings)
            named = {f"{section}.{name}": value for name, value in settings.items()}
            yield named, config.model_copy(update={section: changed})


def _excess(lacks: Sequence[Lack]) -> float:
    return sum(lack.excess for lack in lacks)


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
            for more, changed in remedies(
                config, role, longest, measure(config).served.workers, capacity.gpus or 0
            )
        ]
        others = {lack.role for lack in lacks} - {role}
        enough = [option for option in tried if {lack.role for lack in option[2]} <= others]
        best = min(tried, key=lambda option: _excess(option[2]), default=None)
        if best is None or (not enough and _excess(best[2]) >= _excess(lacks)):
            break
        more, config, lacks = enough[0] if enough else best
        settings |= more
        if not lacks:
            break
    named = ", ".join(f"{name} = {toml_value(value)}" for name, value in settings.items())
    help_ = f"set {named}, with which it fits"
    if lacks:
        help_ = "no setting that was tried helps: take more or larger GPUs, or a smaller model"
    raise InputError("\n".join(["the run does not fit into memory:", *texts, help_]))
