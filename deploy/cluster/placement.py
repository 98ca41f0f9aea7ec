"""Compares the resources that a run requests with those of a cluster's nodes. Pure.

The checks are necessary conditions, of one role and of all together; `assign` is exact. They do not
cover what other jobs hold at the moment, or nodes that an autoscaler would add.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.config.deploy_config import Placement
from deploy.config.devices import EPSILON, left_on_cards
from deploy.config.run_config import RunConfig

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
    shares: tuple[float, ...] = ()
    """Shares of GPUs that processes take, which are not subtracted from the resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The resources that all processes of one role request."""

    role: str
    count: int
    resources: Mapping[str, float]
    """Amounts that each process requests, by kind."""
    labels: Mapping[str, str]
    """Labels that their nodes must have: NODE_LABEL alone for the driver's node."""


def resource_requests(config: RunConfig, *, driver_node: str) -> list[ResourceRequest]:
    """Return what each role requests of a cluster; without a placement, of the driver's node."""
    actors, learner, placement = config.actors, config.learner, config.deploy.placement
    at_driver = Placement(labels={NODE_LABEL: driver_node})
    roles = (
        (
            "learner",
            learner.ranks,
            {"CPU": learner.cpus_of_rank, "GPU": learner.gpus},
            placement.learner or at_driver,
        ),
        (
            "actors",
            actors.count,
            {"CPU": actors.cpus, "GPU": actors.gpus},
            placement.actors or (at_driver if config.weight_sync.one_node else Placement()),
        ),
        (
            "reward_model",
            1 if actors.asks_reward_models else 0,
            {"GPU": actors.reward_model.gpus},
            placement.reward_model or at_driver,
        ),
    )
    return [
        ResourceRequest(
            role=role,
            count=count,
            resources={kind: n for kind, n in {**amounts, **nodes.resources}.items() if n},
            labels=nodes.labels,
        )
        for role, count, amounts, nodes in roles
        if count
    ]


def unmet(requests: Sequence[ResourceRequest], nodes: Sequence[Node]) -> list[str]:
    """Return one line for each request that the nodes cannot meet; none if all may be met."""
    lacks = []
    for request in requests:
        capacity = sum(fits(node, request) for node in nodes)
        if capacity < request.count:
            lacks.append(_describe_lack(request, nodes, capacity))
    if not lacks:
        for labels in [*(request.labels for request in requests), {}]:
            lacks += _excess(labels, requests, nodes)
    return list(dict.fromkeys(lacks))


def roles_of(node: Node, requests: Sequence[ResourceRequest]) -> set[str]:
    """Return the roles that may have a process on a node."""
    return {request.role for request in requests if fits(node, request)}


def fits(node: Node, request: ResourceRequest) -> int:
    """Return how many more processes of a role a node holds."""
    if not request.labels.items() <= node.labels.items():
        return 0
    counts = [
        int((node.resources.get(kind, 0.0) + EPSILON) / amount)
        for kind, amount in request.resources.items()
        if kind != "GPU"
    ]
    return _on_gpus(node, request.resources.get("GPU", 0.0), min([*counts, request.count]))


def _on_gpus(node: Node, amount: float, most: int) -> int:
    """Return how many processes, at most `most`, get so much of a node's GPUs.

    A share lies on one GPU, and more are whole ones.
    """
    if not amount:
        return most
    gpus, part = divmod(node.resources.get("GPU", 0.0) + EPSILON, 1.0)
    if amount >= 1:
        left = gpus + 1 - len(left_on_cards(node.shares, [part]))
        return min(most, int((left + EPSILON) / amount))
    count = 0
    while (
        count < most
        and len(left_on_cards([*node.shares, *[amount] * (count + 1)], [part])) <= gpus + 1
    ):
        count += 1
    return count


def _excess(
    labels: Mapping[str, str], requests: Sequence[ResourceRequest], nodes: Sequence[Node]
) -> list[str]:
    """Return one line for each resource that nodes with these labels lack for all roles on them."""
    total: Counter[str] = Counter()
    needed: Counter[str] = Counter()
    for node in nodes:
        if labels.items() <= node.labels.items():
            total.update(node.resources)
    tied = [request for request in requests if labels.items() <= request.labels.items()]
    for request in tied:
        needed.update({kind: request.count * n for kind, n in request.resources.items()})
    return [
        f"{' and '.join(request.role for request in tied)} together reserve {amount:g} {kind}, but "
        f"there are {total[kind]:g} on {_describe_nodes(labels)}"
        for kind, amount in needed.items()
        if amount > total[kind] + EPSILON
    ]


def _describe_lack(request: ResourceRequest, nodes: Sequence[Node], capacity: int) -> str:
    fitting = [node for node in nodes if request.labels.items() <= node.labels.items()]
    per_process = " and ".join(f"{amount:g} {kind}" for kind, amount in request.resources.items())
    text = (
        f"{request.role}: {request.count} process(es), each with "
        f"{per_process or 'nothing reserved'}, on {_describe_nodes(request.labels)}"
    )
    if not fitting:
        labels = "; ".join(f"{node.address}: {_pairs(node.labels)}" for node in nodes)
        return f"{text}; no node is (labels are {labels})"
    return f"{text}; there is room for {capacity} ({amounts(fitting, request.resources)})"


def amounts(nodes: Sequence[Node], kinds: Iterable[str]) -> str:
    """Format as "10.0.0.1: 8 CPU, 2 GPU; 10.0.0.2: 4 CPU, 0 GPU"."""
    kinds = list(kinds)
    return "; ".join(
        f"{node.address}: "
        + ", ".join(f"{node.resources.get(kind, 0.0):g} {kind}" for kind in kinds)
        for node in nodes
    )


def _describe_nodes(labels: Mapping[str, str]) -> str:
    if NODE_LABEL in labels:
        return "the driver's node"
    return f"nodes labelled {_pairs(labels)}" if labels else "the cluster"


def _pairs(labels: Mapping[str, str]) -> str:
    """Format labels, without Ray's id of the node."""
    own = [f"{key}={value}" for key, value in sorted(labels.items()) if key != NODE_LABEL]
    return ", ".join(own) or "none"
