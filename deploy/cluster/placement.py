"""Whether a cluster has the nodes that the processes of a run need: pure, from what nodes have.

Every answer here is a necessary condition: what is refused could not start on the nodes that there
are. Leaves out where Ray puts a process in the end, what other jobs hold at the moment, and nodes
that an autoscaler would add.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deploy.config.deploy_config import Placement
from deploy.config.run_config import RunConfig
from learner.config.cpu_affinity import cpus_of

EPSILON = 1e-6
NODE_LABEL = "ray.io/node-id"
"""That Ray gives each node itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is alive."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """CPU, GPU and whatever it was given."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The processes of one role."""

    role: str
    count: int
    resources: Mapping[str, float]
    """Of each."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of their nodes."""
    node_id: str | None = None
    """The only node for them; None: any."""


class Bundle(NamedTuple):
    """What one process reserves on one node."""

    role: str
    number: int
    """Among the processes of its role."""
    resources: dict[str, float]
    labels: dict[str, str]
    """Of the node."""


def resource_requests(config: RunConfig, *, driver_node: str) -> list[ResourceRequest]:
    """What a recipe asks of a cluster.

    Args:
        config: The recipe.
        here: The driver's node, where everything is that the recipe does not place.
    """
    actors, learner, place = config.actors, config.learner, config.deploy.placement
    tied = config.weight_sync.one_node and place.actors is None
    found = [
        _want(
            "learner",
            learner.ranks,
            {"CPU": cpus_of(learner), "GPU": learner.gpus},
            place.learner,
            here if place.learner is None else None,
        ),
        _want(
            "actors",
            actors.count,
            {"CPU": actors.cpus, "GPU": actors.gpus},
            place.actors,
            here if tied else None,
        ),
    ]
    if actors.asks_reward_models:
        gpus = {"GPU": actors.reward_model.gpus}
        fixed = here if place.reward_model is None else None
        found.append(_want("reward_model", 1, gpus, place.reward_model, fixed))
    return found


def options(placement: Placement | None, default: Any) -> dict[str, Any]:
    """Ray's options of a role: its placement, or a scheduling strategy where it has none."""
    if placement is None:
        return {"scheduling_strategy": default}
    return {"label_selector": dict(placement.labels), "resources": dict(placement.resources)}


def bundles(wanted: Sequence[ResourceRequest]) -> list[Bundle]:
    """What the processes reserve, by role and number; those that reserve nothing are left out."""
    return [
        Bundle(want.role, index, dict(want.resources), _labels(want))
        for want in wanted
        if want.resources
        for index in range(want.count)
    ]


def missing(wanted: Sequence[ResourceRequest], nodes: Sequence[Node]) -> list[str]:
    """What the cluster lacks, one line each; none where everything may find its place."""
    lacks = []
    for want in wanted:
        fitting = [node for node in nodes if _matches(node, want)]
        room = sum(_room(node, want) for node in fitting)
        if room < want.count:
            lacks.append(_lack(want, fitting, nodes, room))
    if lacks:
        return lacks
    bound: dict[Any, list[ResourceRequest]] = {}
    for want in wanted:
        if labels := _labels(want):
            bound.setdefault(tuple(sorted(labels.items())), []).append(want)
    for group in bound.values():
        roles = " and ".join(want.role for want in group)
        where = [node for node in nodes if _matches(node, group[0])]
        lacks += _too_much(roles, _where(group[0]), group, where)
    return lacks or _too_much("all processes", "the cluster", wanted, nodes)


def _too_much(
    who: str, where: str, wanted: Sequence[ResourceRequest], nodes: Sequence[Node]
) -> list[str]:
    """What processes reserve together beyond what their nodes have together."""
    total: Counter[str] = Counter()
    needed: Counter[str] = Counter()
    for node in nodes:
        total.update(node.resources)
    for want in wanted:
        needed.update({kind: want.count * n for kind, n in want.resources.items()})
    return [
        f"{who} together reserve {amount:g} {kind}, but {where} has {total[kind]:g}"
        for kind, amount in needed.items()
        if amount > total[kind] + EPSILON
    ]


def _where(want: ResourceRequest) -> str:
    return f"what is labelled {_pairs(want.labels)}" if want.labels else "the driver's node"


def hosted(node: Node, wanted: Sequence[ResourceRequest]) -> set[str]:
    """The roles that may have a process on a node."""
    return {want.role for want in wanted if _matches(node, want) and _room(node, want)}


def _want(
    role: str,
    count: int,
    resources: Mapping[str, float],
    placement: Placement | None,
    node_id: str | None,
) -> ResourceRequest:
    more: Mapping[str, float] = {} if placement is None else placement.resources
    each = {kind: amount for kind, amount in {**resources, **more}.items() if amount}
    return ResourceRequest(
        role=role,
        count=count,
        resources=each,
        labels={} if placement is None else placement.labels,
        node_id=node_id,
    )


def _labels(want: ResourceRequest) -> dict[str, str]:
    tied = {} if want.node_id is None else {NODE_LABEL: want.node_id}
    return {**want.labels, **tied}


def _matches(node: Node, want: ResourceRequest) -> bool:
    if want.node_id is not None and node.node_id != want.node_id:
        return False
    return all(node.labels.get(key) == value for key, value in want.labels.items())


def _room(node: Node, want: ResourceRequest) -> int:
    """Processes of a role that fit on one node by themselves."""
    fits = [
        int((node.resources.get(kind, 0.0) + EPSILON) / amount)
        for kind, amount in want.resources.items()
    ]
    return min(fits, default=want.count)


def _lack(want: ResourceRequest, fitting: Sequence[Node], nodes: Sequence[Node], room: int) -> str:
    each = " and ".join(f"{amount:g} {kind}" for kind, amount in want.resources.items())
    asks = f"{want.role}: {want.count} process(es), each with {each or 'nothing reserved'}"
    if want.labels:
        asks += f", on nodes labelled {_pairs(want.labels)}"
    if want.node_id is not None:
        asks += ", on the driver's node"
    if not fitting:
        known = "; ".join(f"{node.address}: {_pairs(node.labels)}" for node in nodes)
        return f"{asks}; no node is (labels are {known})"
    there = "; ".join(f"{node.address}: {_amounts(node, want)}" for node in fitting)
    return f"{asks}; there is room for {room} ({there})"


def _amounts(node: Node, want: ResourceRequest) -> str:
    return ", ".join(f"{node.resources.get(kind, 0.0):g} {kind}" for kind in want.resources)


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"
