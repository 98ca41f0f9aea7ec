"""Reserves resources on a joined cluster for all processes of a run, as a Ray placement group.

Two runs that each hold half of what both need would wait for each other; a placement group is given
out whole or not at all. A cluster that was started for the run has nobody else, and no group.
"""

import time
from collections.abc import Sequence
from typing import Any

from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.placement import ResourceRequest
from deploy.cluster.ray_cluster import alive_nodes
from deploy.errors import RunFailed
from deploy.runtime.console import Terminal

LOOK_SECONDS = 1
"""Whole seconds between two looks at the group, in which Ctrl-C takes effect."""
REPORT_SECONDS = 60.0
"""Seconds between two reports of a wait."""


class Reservation:
    """The resources that a run holds on a `shared` cluster until its driver ends.

    They are packed if every role has labels or a node of its own, and spread otherwise.

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
        processes = [
            (request, number)
            for request in requests
            if shared and request.resources
            for number in range(request.count)
        ]
        self._indices = {(r.role, number): index for index, (r, number) in enumerate(processes)}
        self.group: PlacementGroup | None = None
        if not processes:
            return
        labels = [dict(request.labels) for request, _ in processes]
        group = placement_group(
            [dict(request.resources) for request, _ in processes],
            strategy="PACK" if all(labels) else "SPREAD",
            bundle_label_selector=labels,
        )
        try:
            _wait(group, timeout, console, first_report_seconds)
        except BaseException:
            remove_placement_group(group)
            raise
        self.group = group

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Return Ray's options of process `number` (from 0) of a role.

        Custom resources are in them although a bundle has them, so that `ray status` counts them
        as used.
        """
        request = self._requests[role]
        custom = {kind: n for kind, n in request.resources.items() if kind not in ("CPU", "GPU")}
        index = self._indices.get((role, number))
        if index is not None:
            strategy = PlacementGroupSchedulingStrategy(self.group, index)
            return {"resources": custom, "scheduling_strategy": strategy}
        if request.labels:
            return {"resources": custom, "label_selector": dict(request.labels)}
        return {"resources": custom, "scheduling_strategy": "SPREAD"}


def _wait(group: PlacementGroup, timeout: float, console: Terminal, due: float) -> None:
    """Wait for a group, which is first reported after `due` seconds."""
    began = time.monotonic()
    while not group.wait(LOOK_SECONDS):
        waited = time.monotonic() - began
        if waited > timeout:
            raise RunFailed(
                f"the cluster had no free resources for all processes of this run within "
                f"deploy.start_timeout_seconds = {timeout:g}; {_free()}"
            )
        if waited > due:
            console.say(f"waiting for free resources on the cluster for {waited:.0f} s; {_free()}")
            due += REPORT_SECONDS


def _free() -> str:
    """Describe the resources of each node that nobody holds at the moment."""
    free = available_resources_per_node()
    return "free now are " + "; ".join(
        f"{node.address}: {_amounts(free.get(node.node_id, {}))}" for node in alive_nodes()
    )


def _amounts(free: dict[str, float]) -> str:
    """Format as "2 CPU, 1 GPU", without memory, names of nodes and resources of groups."""
    own = {
        kind: amount
        for kind, amount in sorted(free.items())
        if "memory" not in kind and ":" not in kind and "_group_" not in kind
    }
    return ", ".join(f"{amount:g} {kind}" for kind, amount in own.items()) or "nothing"
