"""Compares the resources that a run requests with those of a cluster's nodes. Pure.

The checks are necessary conditions: a run that is refused could not start on the present nodes.
They do not cover where Ray puts a process in the end, what other jobs hold at the moment, or nodes
that an autoscaler would add.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deploy.config.deploy_config import Placement
from deploy.config.run_config import RunConfig

EPSILON = 1e-6
NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives every node, with its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is alive."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """CPU, GPU and custom resources."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The resources that all processes of one role request."""

    role: str
    count: int
    resources: Mapping[str, float]
    """Amounts that each process requests, by kind."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that their nodes must have."""
    node_id: str | None = None
    """The only node that they may be on; None: any node."""


class Bundle(NamedTuple):
    """The resources that process `number` (from 0) of a role reserves on a node with the labels."""

    role: str
    number: int
    resources: dict[str, float]
    labels: dict[str, str]


def resource_requests(config: RunConfig, *, driver_node: str) -> list[ResourceRequest]:
    """Return what each role requests of a cluster; without a placement, of the driver's node."""
    actors, learner, placement = config.actors, config.learner, config.deploy.placement
    requests = [
        _request(
            "learner",
            learner.ranks,
            {"CPU": learner.cpus_of_rank, "GPU": learner.gpus},
            placement.learner,
            driver_node,
        ),
        _request(
            "actors",
            actors.count,
            {"CPU": actors.cpus, "GPU": actors.gpus},
            placement.actors,
            driver_node if config.weight_sync.one_node else None,
        ),
    ]
    if actors.asks_reward_models:
        gpus = {"GPU": actors.reward_model.gpus}
        requests.append(_request("reward_model", 1, gpus, placement.reward_model, driver_node))
    return requests


def options(placement: Placement | None, default: Any) -> dict[str, Any]:
    """Return Ray's options of a role: its placement, or a scheduling strategy if it has none."""
    if placement is None:
        return {"scheduling_strategy": default}
    return {"label_selector": dict(placement.labels), "resources": dict(placement.resources)}


def bundles(requests: Sequence[ResourceRequest]) -> list[Bundle]:
    """Return the bundle of every process that reserves something, by role and number."""
    return [
        Bundle(request.role, index, dict(request.resources), _labels(request))
        for request in requests
        if request.resources
        for index in range(request.count)
    ]


def unmet(requests: Sequence[ResourceRequest], nodes: Sequence[Node]) -> list[str]:
    """Return one line for each request that the nodes cannot meet; none if all may be met."""
    lacks = []
    for request in requests:
        fitting = [node for node in nodes if _matches(node, request)]
        capacity = sum(_capacity(node, request) for node in fitting)
        if capacity < request.count:
            lacks.append(_describe_lack(request, fitting, nodes, capacity))
    if lacks:
        return lacks
    bound: dict[Any, list[ResourceRequest]] = {}
    for request in requests:
        if labels := _labels(request):
            bound.setdefault(tuple(sorted(labels.items())), []).append(request)
    for group in bound.values():
        roles = " and ".join(request.role for request in group)
        shared = [node for node in nodes if _matches(node, group[0])]
        selector = group[0].labels
        where = f"what is labelled {_pairs(selector)}" if selector else "the driver's node"
        lacks += _excess(roles, where, group, shared)
    return lacks or _excess("all processes", "the cluster", requests, nodes)


def _excess(
    who: str, where: str, requests: Sequence[ResourceRequest], nodes: Sequence[Node]
) -> list[str]:
    """Return one line for each resource of which the requests exceed the sum over the nodes."""
    total: Counter[str] = Counter()
    needed: Counter[str] = Counter()
    for node in nodes:
        total.update(node.resources)
    for request in requests:
        needed.update({kind: request.count * n for kind, n in request.resources.items()})
    return [
        f"{who} together reserve {amount:g} {kind}, but {where} has {total[kind]:g}"
        for kind, amount in needed.items()
        if amount > total[kind] + EPSILON
    ]


def roles_of(node: Node, requests: Sequence[ResourceRequest]) -> set[str]:
    """Return the roles that may have a process on a node."""
    return {
        request.role for request in requests if _matches(node, request) and _capacity(node, request)
    }


def _request(
    role: str,
    count: int,
    resources: Mapping[str, float],
    placement: Placement | None,
    default_node: str | None,
) -> ResourceRequest:
    """Build the request of a role, which is on `default_node` if it has no placement."""
    custom = placement.resources if placement else {}
    return ResourceRequest(
        role=role,
        count=count,
        resources={kind: n for kind, n in {**resources, **custom}.items() if n},
        labels=placement.labels if placement else {},
        node_id=None if placement else default_node,
    )


def _labels(request: ResourceRequest) -> dict[str, str]:
    tied = {} if request.node_id is None else {NODE_LABEL: request.node_id}
    return {**request.labels, **tied}


def _matches(node: Node, request: ResourceRequest) -> bool:
    return request.node_id in (None, node.node_id) and all(
        node.labels.get(key) == value for key, value in request.labels.items()
    )


def _capacity(node: Node, request: ResourceRequest) -> int:
    """Return how many processes of a role fit on one node by themselves."""
    fits = [
        int((node.resources.get(kind, 0.0) + EPSILON) / amount)
        for kind, amount in request.resources.items()
    ]
    return min(fits, default=request.count)


def _describe_lack(
    request: ResourceRequest, fitting: Sequence[Node], nodes: Sequence[Node], capacity: int
) -> str:
    per_process = " and ".join(f"{amount:g} {kind}" for kind, amount in request.resources.items())
    text = (
        f"{request.role}: {request.count} process(es), each with "
        f"{per_process or 'nothing reserved'}"
    )
    if request.labels:
        text += f", on nodes labelled {_pairs(request.labels)}"
    if request.node_id is not None:
        text += ", on the driver's node"
    if not fitting:
        labels = "; ".join(f"{node.address}: {_pairs(node.labels)}" for node in nodes)
        return f"{text}; no node is (labels are {labels})"
    amounts = [
        f"{node.address}: "
        + ", ".join(f"{node.resources.get(kind, 0.0):g} {kind}" for kind in request.resources)
        for node in fitting
    ]
    return f"{text}; there is room for {capacity} ({'; '.join(amounts)})"


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"
