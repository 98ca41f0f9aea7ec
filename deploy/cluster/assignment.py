"""Assigns every process of a run to a node of a cluster. Pure.

Ray places the bundles of a group one after another and does not undo a choice: engines of several
GPUs find no node where single GPUs were taken from each before. A run therefore chooses the nodes
itself, and ties each bundle to its own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from deploy.cluster.placement import NODE_LABEL, Node, ResourceRequest, amounts, fits, unmet

Process = tuple[str, int]
"""A role, and the number of one of its processes, from 0."""
Counts = tuple[int, ...]
"""Numbers of processes, by role."""


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
    if lacks := unmet(requests, nodes):
        return lacks
    if assign(requests, nodes) is not None:
        return []
    kinds = dict.fromkeys(kind for request in requests for kind in request.resources)
    processes = " and ".join(
        f"{request.count} of {request.role} with "
        + ", ".join(f"{amount:g} {kind}" for kind, amount in request.resources.items())
        for request in requests
        if request.resources
    )
    return [
        f"no node holds part of a process, and {processes} do not fit together on the nodes "
        f"({amounts(nodes, kinds)})"
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

    Of the last role there are as many as fit: fewer would help nobody.
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
