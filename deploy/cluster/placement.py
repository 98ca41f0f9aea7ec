"""Places the processes of a run on the nodes of a cluster. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deploy.config.deploy_config import Placement
from deploy.config.devices import EPSILON, left_on_cards
from deploy.config.run_config import RunConfig
from headway.roles import Role

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives every node, with its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is alive."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    shares: tuple[float, ...] = ()
    """Shares of GPUs that processes take, which are not subtracted from the resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The resources that all processes of one role request."""

    role: Role
    count: int
    resources: Mapping[str, float]
    """Amounts that each process requests, by kind."""
    labels: Mapping[str, str]
    """Labels that their nodes must have: NODE_LABEL alone for the driver's node."""


def resource_requests(config: RunConfig, *, driver_node: str) -> list[ResourceRequest]:
    """Return what each role requests of a cluster; without a placement, of the driver's node."""
    actors, learner, placement = config.actors, config.learner, config.deploy.placement
    at_driver = Placement(labels={NODE_LABEL: driver_node})

    def request(
        role: Role, count: int, amounts: Mapping[str, float], nodes: Placement
    ) -> ResourceRequest:
        resources = {kind: n for kind, n in {**amounts, **nodes.resources}.items() if n}
        return ResourceRequest(role=role, count=count, resources=resources, labels=nodes.labels)

    of_rank = {"CPU": learner.cpus_of_rank, "GPU": learner.gpus}
    of_actor = {"CPU": actors.cpus, "GPU": actors.gpus}
    for_actors = placement.actors or (at_driver if config.weight_sync.one_node else Placement())
    requests = [
        request(Role.LEARNER, learner.ranks, of_rank, placement.learner or at_driver),
        request(Role.ACTOR, actors.count, of_actor, for_actors),
    ]
    if actors.asks_reward_models:
        gpus = {"GPU": actors.reward_model.gpus}
        requests.append(request(Role.REWARD_MODEL, 1, gpus, placement.reward_model or at_driver))
    return requests


def roles_of(node: Node, requests: Sequence[ResourceRequest]) -> set[Role]:
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
    """Return how many processes, up to `most`, get a share of one GPU, or whole GPUs, of a node."""
    if not amount:
        return most
    gpus, part = divmod(node.resources.get("GPU", 0.0) + EPSILON, 1.0)
    if amount >= 1:
        left = gpus + 1 - len(left_on_cards(node.shares, [part]))
        return min(most, int((left + EPSILON) / amount))
    for more in range(1, most + 1):
        if len(left_on_cards([*node.shares, *[amount] * more], [part])) > gpus + 1:
            return more - 1
    return most


def _describe(request: ResourceRequest) -> str:
    per_process = " and ".join(f"{amount:g} {kind}" for kind, amount in request.resources.items())
    return (
        f"{request.role.section}: {request.count} process(es), each with "
        f"{per_process or 'nothing reserved'}, on {_describe_nodes(request.labels)}"
    )


def _describe_lack(request: ResourceRequest, nodes: Sequence[Node], capacity: int) -> str:
    fitting = [node for node in nodes if request.labels.items() <= node.labels.items()]
    if not fitting:
        labels = "; ".join(f"{node.address}: {_pairs(node.labels)}" for node in nodes)
        return f"{_describe(request)}; no node is (labels are {labels})"
    there = amounts(fitting, request.resources)
    return f"{_describe(request)}; there is room for {capacity} ({there})"


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


Process = tuple[Role, int]
"""A role, and the number of one of its processes, from 0."""
Counts = tuple[int, ...]


def assign(requests: Sequence[ResourceRequest], nodes: Sequence[Node]) -> dict[Process, str] | None:
    """Return the id of the node of each process; None if the nodes cannot hold all of them.

    Processes of a role fill one node before the next one, numbers in order. Roles with labels come
    first, so that others leave them their nodes. The search is exact: it tries other splits of the
    roles where that fails, and remembers what was in vain.
    """
    ordered = sorted(requests, key=lambda request: not request.labels)
    tied = {request.labels[NODE_LABEL] for request in ordered if NODE_LABEL in request.labels}
    nodes = sorted(nodes, key=lambda node: node.node_id not in tied)
    counts = _counts(tuple(request.count for request in ordered), ordered, nodes, 0, set())
    if counts is None:
        return None
    return {
        (request.role, number): node_id
        for index, request in enumerate(ordered)
        for number, node_id in enumerate(
            node.node_id
            for node, on_node in zip(nodes, counts, strict=True)
            for _ in range(on_node[index])
        )
    }


def to_free(
    requests: Sequence[ResourceRequest],
    nodes: Sequence[Node],
    held: Mapping[int, str],
    resources: Mapping[str, float],
) -> list[int]:
    """Return which of some processes have to end so that all that are requested fit.

    Process `number` holds `resources` of the node `held[number]`. The first so many in the order of
    `held`; none if the nodes are enough as they are, or not even then.
    """
    free = {node.node_id: node for node in nodes}
    freed: list[int] = []
    for number, node_id in held.items():
        if assign(requests, [*free.values()]) is not None:
            return freed
        if (node := free.get(node_id)) is not None:
            total = Counter(node.resources)
            total.update(resources)
            free[node_id] = replace(node, resources=total)
            freed.append(number)
    return freed if assign(requests, [*free.values()]) is not None else []


def lacking(requests: Sequence[ResourceRequest], nodes: Sequence[Node]) -> list[str]:
    """Return why the nodes cannot hold all processes, a line for each reason; none if they can."""
    lacks = [
        _describe_lack(request, nodes, capacity)
        for request in requests
        if (capacity := sum(fits(node, request) for node in nodes)) < request.count
    ]
    needed: dict[str, float] = {}
    for request in requests:
        for kind, amount in request.resources.items():
            needed[kind] = needed.get(kind, 0.0) + request.count * amount
    short = any(
        amount > sum(node.resources.get(kind, 0.0) for node in nodes) + EPSILON
        for kind, amount in needed.items()
    )
    if lacks or not (short or assign(requests, nodes) is None):
        return lacks
    wanted = "; ".join(_describe(request) for request in requests if request.resources)
    total = ", ".join(f"{amount:g} {kind}" for kind, amount in needed.items())
    allowed = [node for node in nodes if roles_of(node, requests)]
    return [
        f"{wanted}; together {total}, which do not fit on the nodes that they may be on "
        f"({amounts(allowed, needed)})"
    ]


def _counts(
    left: Counts,
    requests: Sequence[ResourceRequest],
    nodes: Sequence[Node],
    position: int,
    in_vain: set[tuple[int, Counts]],
) -> list[Counts] | None:
    """Return how many processes of each role go to each node from `position` on, or None."""
    if not any(left):
        return [left] * (len(nodes) - position)
    if (position, left) in in_vain or any(
        sum(fits(node, request) for node in nodes[position:]) < count
        for request, count in zip(requests, left, strict=True)
    ):
        return None
    for on_node in _splits(left, requests, nodes[position]):
        rest = tuple(count - taken for count, taken in zip(left, on_node, strict=True))
        if (others := _counts(rest, requests, nodes, position + 1, in_vain)) is not None:
            return [on_node, *others]
    in_vain.add((position, left))
    return None


def _splits(left: Counts, requests: Sequence[ResourceRequest], node: Node) -> Iterator[Counts]:
    """Yield the numbers of processes that may go to a node, those of the first role descending.

    Of the last role as many go as fit: fewer would help nobody.
    """
    if not left:
        yield ()
        return
    most = min(left[0], fits(node, requests[0]))
    for count in range(most, -1 if len(left) > 1 else most - 1, -1):
        for others in _splits(left[1:], requests[1:], _without(node, requests[0], count)):
            yield (count, *others)


def _without(node: Node, request: ResourceRequest, count: int) -> Node:
    """Return a node without what some processes take of it."""
    taken = dict(request.resources)
    shares = [taken.pop("GPU")] * count if 0 < taken.get("GPU", 0) < 1 else []
    left = {kind: n - count * taken.get(kind, 0.0) for kind, n in node.resources.items()}
    return replace(node, resources=left, shares=(*node.shares, *shares))
