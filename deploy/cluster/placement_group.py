"""Reserves resources on a joined cluster for all processes of a run, as a Ray placement group.

Two runs that each hold half of what both need would wait for each other; a placement group is given
out whole or not at all. It is asked for when the nodes have what it needs, each bundle of it on the
node that `assign` chose. A cluster that was started for the run has nobody else, and no group.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.assignment import Process, assign
from deploy.cluster.placement import NODE_LABEL, Node, ResourceRequest
from deploy.cluster.ray_cluster import alive_nodes
from deploy.errors import RunFailed
from deploy.runtime.console import Terminal

LOOK_SECONDS = 1.0
"""Seconds between two looks at what is free."""
READY_SECONDS = 5
"""Whole seconds that Ray gets to make a group on nodes that have what it needs."""
REPORT_SECONDS = 60.0
"""Seconds between two reports of a wait."""


class Reservation:
    """The resources that a run holds on a `shared` cluster until its driver ends.

    Raises:
        RunFailed: They were not free within `timeout` seconds; names what is free.
    """

    def __init__(
        self,
        requests: Sequence[ResourceRequest],
        timeout: float,
        console: Terminal,
        *,
        shared: bool = True,
        first_report_seconds: float = 3.0,
    ) -> None:
        self._requests = {request.role: request for request in requests}
        self._bundles: dict[Process, int] = {}
        """The index of the bundle of each process."""
        self.group: PlacementGroup | None = None
        reserving = [request for request in requests if shared and request.resources]
        if not reserving:
            return
        began, due = time.monotonic(), first_report_seconds
        while (group := self._try_to_reserve(reserving)) is None:
            waited = time.monotonic() - began
            if waited > timeout:
                raise RunFailed(
                    f"the cluster had no free resources for all processes of this run within "
                    f"deploy.start_timeout_seconds = {timeout:g}; {_describe_free()}"
                )
            if waited > due:
                console.say(
                    f"waiting for free resources on the cluster for {waited:.0f} s; "
                    f"{_describe_free()}"
                )
                due += REPORT_SECONDS
            time.sleep(LOOK_SECONDS)
        self.group = group

    def _try_to_reserve(self, requests: Sequence[ResourceRequest]) -> PlacementGroup | None:
        """Reserve what is free now; return None if it does not suffice."""
        if (nodes := assign(requests, _free_nodes())) is None:
            return None
        self._bundles = {process: index for index, process in enumerate(nodes)}
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
        return group if ready else None

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Return Ray's options of process `number` (from 0) of a role.

        Custom resources are in them although a bundle has them, so that `ray status` counts them
        as used.
        """
        request = self._requests[role]
        custom = {kind: n for kind, n in request.resources.items() if kind not in ("CPU", "GPU")}
        index = self._bundles.get((role, number))
        if index is not None:
            strategy = PlacementGroupSchedulingStrategy(self.group, index)
            return {"resources": custom, "scheduling_strategy": strategy}
        if request.labels:
            return {"resources": custom, "label_selector": dict(request.labels)}
        return {"resources": custom, "scheduling_strategy": "SPREAD"}


def _free_nodes() -> list[Node]:
    """Return the nodes with what nobody holds of them at the moment."""
    free = available_resources_per_node()
    return [replace(node, resources=free.get(node.node_id, {})) for node in alive_nodes()]


def _describe_free() -> str:
    return "free now are " + "; ".join(
        f"{node.address}: {_amounts(node.resources)}" for node in _free_nodes()
    )


def _amounts(free: Mapping[str, float]) -> str:
    """Format as "2 CPU, 1 GPU", without memory, names of nodes and resources of groups."""
    own = {
        kind: amount
        for kind, amount in sorted(free.items())
        if "memory" not in kind and ":" not in kind and "_group_" not in kind
    }
    return ", ".join(f"{amount:g} {kind}" for kind, amount in own.items()) or "nothing"
