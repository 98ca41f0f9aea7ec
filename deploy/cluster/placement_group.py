"""Reserves resources on a joined cluster for all processes of a run, as a Ray placement group.

Two runs that each hold half of what both need would wait for each other; a placement group is given
out whole or not at all. It is asked for when the nodes have what it needs, each bundle of it on the
node that `assign` chose. A process that joins later has a group of its own, which it gives back. A
cluster that was started for the run has nobody else, and no group.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.placement import (
    NODE_LABEL,
    Node,
    Process,
    ResourceRequest,
    assign,
    lacking,
    to_free,
)
from deploy.cluster.ray_cluster import alive_nodes
from deploy.errors import RunFailed
from deploy.runtime.console import Terminal
from headway.ray_process import draining_nodes, free_resources
from headway.roles import Role

LOOK_SECONDS = 1.0
"""Seconds between two looks at what is free."""
READY_SECONDS = 5
"""Whole seconds that Ray gets to make a group on nodes that have what it needs."""
REPORT_SECONDS = 60.0
"""Seconds between two reports of a wait."""


class Bundle(NamedTuple):
    """Resources that one process holds, of one node for ever, by their position in a group."""

    group: PlacementGroup
    position: int
    node_id: str


class Reservation:
    """The resources that a run holds on a `shared` cluster until its driver ends.

    The run may begin with fewer processes of the roles in `fewest`: as many as there is room for,
    at least so many. `add` reserves for others later. Raises RunFailed, which names what is free,
    if they were not free within `timeout` seconds.
    """

    def __init__(
        self,
        requests: Sequence[ResourceRequest],
        timeout: float,
        console: Terminal,
        *,
        shared: bool = True,
        fewest: Mapping[Role, int] = MappingProxyType({}),
        first_report_seconds: float = 3.0,
    ) -> None:
        self._requests = {request.role: request for request in requests}
        self._bundles: dict[Process, Bundle] = {}
        self._shared = shared
        self.group: PlacementGroup | None = None
        """The group that the run began with, which ends with it."""
        self.awaited: set[Role] = set()
        """Roles of which `restore` could not place every process."""
        self._lock = threading.RLock()
        reserving = [request for request in requests if shared and request.resources]
        if not reserving:
            return
        began, due = time.monotonic(), first_report_seconds
        while (group := self._reserve_most(reserving, fewest)) is None:
            waited = time.monotonic() - began
            if waited > timeout:
                raise RunFailed(
                    f"the cluster had no free resources for all processes of this run within "
                    f"deploy.start_timeout_seconds = {timeout:g}; {_describe_free()}"
                )
            if waited > due:
                text = f"waiting for free resources on the cluster for {waited:.0f} s"
                console.say(f"{text}; {_describe_free()}")
                due += REPORT_SECONDS
            time.sleep(LOOK_SECONDS)
        self.group = group

    def _reserve_most(
        self, requests: Sequence[ResourceRequest], fewest: Mapping[Role, int]
    ) -> PlacementGroup | None:
        """Reserve as many processes as there is room for; None if it is too little."""
        spare = [request.count - fewest.get(request.role, request.count) for request in requests]
        for fewer in range(max(0, *spare) + 1):
            some = [
                replace(request, count=request.count - min(fewer, most))
                for request, most in zip(requests, spare, strict=True)
            ]
            if (group := self._try_to_reserve(some)) is not None:
                return group
        return None

    def waits(self, role: Role, number: int) -> bool:
        """Return True if a process needs resources and holds none."""
        needed = self._shared and self._requests[role].resources
        return bool(needed) and (role, number) not in self._bundles

    def lacking(self, role: Role, numbers: Sequence[int], count: int) -> list[str]:
        """Return why these processes of a role, of then `count`, do not fit; none if they do."""
        request = self._requests[role]
        if self._shared:
            new = [number for number in numbers if not self.holds(role, number)]
            return lacking([replace(request, count=len(new))], _free_nodes()) if new else []
        others = [other for other in self._requests.values() if other is not request]
        return lacking([replace(request, count=count), *others], alive_nodes())

    def holds(self, role: Role, number: int) -> bool:
        """Return True if a process has resources on a node that stays."""
        bundle = self._bundles.get((role, number))
        return bundle is not None and bundle.node_id in staying_nodes()

    def add(self, role: Role, number: int) -> bool:
        """Reserve the resources of one process, if it holds none; return False if none are free.

        Where the node of those that it held is lost or drained, it gets others.
        """
        request = self._requests[role]
        with self._lock:
            if not (self._shared and request.resources) or self.holds(role, number):
                return True
            self.remove(role, number)
            return self._try_to_reserve([replace(request, count=1)], first=number) is not None

    def restore(self, role: Role) -> bool:
        """Give every process of a role what `add` gives one; return False if too little is free."""
        added = [self.add(role, number) for number in range(self._requests[role].count)]
        if all(added):
            self.awaited.discard(role)
        else:
            self.awaited.add(role)
        return all(added)

    def remove(self, role: Role, number: int) -> None:
        """Give back what `add` reserved; what the run began with stays reserved."""
        with self._lock:
            if bundle := self._own_bundle(role, number):
                remove_placement_group(bundle.group)
                del self._bundles[role, number]

    def to_give_back(self, role: Role, numbers: Sequence[int]) -> list[int]:
        """Return which of these processes end so that all of `awaited` roles fit; see `to_free`."""
        missing = {
            name: sum(not self.holds(name, n) for n in range(self._requests[name].count))
            for name in self._requests
            if name in self.awaited
        }
        awaited = [replace(self._requests[name], count=n) for name, n in missing.items() if n]
        held = {n: bundle.node_id for n in numbers if (bundle := self._own_bundle(role, n))}
        return to_free(awaited, _free_nodes(), held, self._requests[role].resources)

    def _own_bundle(self, role: Role, number: int) -> Bundle | None:
        """Return what a process can give back: not what the run began with."""
        bundle = self._bundles.get((role, number))
        return None if bundle is None or bundle.group is self.group else bundle

    def node(self, role: Role, number: int) -> str | None:
        """Return Ray's id of the node where a process holds resources; None where it holds none."""
        bundle = self._bundles.get((role, number))
        return bundle and bundle.node_id

    def _try_to_reserve(
        self, requests: Sequence[ResourceRequest], first: int = 0
    ) -> PlacementGroup | None:
        """Reserve what is free now, for processes from number `first`; None if it is too little."""
        if (nodes := assign(requests, _free_nodes())) is None:
            return None
        group = placement_group(
            [dict(self._requests[role].resources) for role, _ in nodes],
            strategy="PACK",
            bundle_label_selector=[{NODE_LABEL: node_id} for node_id in nodes.values()],
        )
        ready = False
        try:
            ready = group.wait(READY_SECONDS)  # not if another run was faster
        finally:
            if not ready:
                remove_placement_group(group)
        if not ready:
            return None
        for index, ((role, number), node) in enumerate(nodes.items()):
            self._bundles[role, first + number] = Bundle(group, index, node)
        return group

    def options(self, role: Role, number: int) -> dict[str, Any]:
        """Return Ray's options of process `number` (from 0) of a role."""
        # Custom resources are in them beside the bundle, so that `ray status` counts them as used.
        request = self._requests[role]
        custom = {kind: n for kind, n in request.resources.items() if kind not in ("CPU", "GPU")}
        bundle = self._bundles.get((role, number))
        if bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(bundle.group, bundle.position)
            return {"resources": custom, "scheduling_strategy": strategy}
        if request.labels:
            return {"resources": custom, "label_selector": dict(request.labels)}
        return {"resources": custom, "scheduling_strategy": "SPREAD"}


def staying_nodes() -> set[str]:
    """Return Ray's ids of the nodes that are alive and that Ray does not drain."""
    return {node.node_id for node in alive_nodes()} - draining_nodes()


def _free_nodes() -> list[Node]:
    """Return the nodes that stay, with what nobody holds of them at the moment."""
    free, staying = free_resources(), staying_nodes()
    return [
        replace(node, resources=free.get(node.node_id, {}))
        for node in alive_nodes()
        if node.node_id in staying
    ]


def _describe_free() -> str:
    """Describe what is free, without memory, names of nodes and resources of groups."""
    texts = []
    for node in _free_nodes():
        own = [
            f"{amount:g} {kind}"
            for kind, amount in sorted(node.resources.items())
            if "memory" not in kind and ":" not in kind and "_group_" not in kind
        ]
        texts.append(f"{node.address}: {', '.join(own) or 'nothing'}")
    return f"free now are {'; '.join(texts)}"
