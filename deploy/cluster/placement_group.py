"""Reserves resources on a joined cluster for all processes of a run, as a Ray placement group.

Two runs that each hold half of what both need would wait for each other; a placement group is given
out whole or not at all. A cluster that was started for the run has nobody else, and no group.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.placement import ResourceRequest, bundles
from deploy.errors import RunFailed
from deploy.runtime.console import Terminal

LOOK_SECONDS = 1
"""Interval of the questions whether the group is ready, whole as Ray wants it; Ctrl-C takes effect
in between."""
REPORT_SECONDS = 3.0
"""A wait is first reported once it has lasted this long, then every REPORT_AGAIN_SECONDS."""
REPORT_AGAIN_SECONDS = 60.0


class Reservation:
    """The bundles that a run holds until its driver ends.

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
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        reserved = bundles(requests)
        self._indices = {(b.role, b.number): index for index, b in enumerate(reserved)}
        self.group: PlacementGroup | None = None
        if not reserved:
            return
        group = placement_group(
            [bundle.resources for bundle in reserved],
            strategy="PACK" if all(bundle.labels for bundle in reserved) else "SPREAD",
            bundle_label_selector=[bundle.labels for bundle in reserved],
        )
        try:
            _wait(group, timeout, console, report_seconds)
        except BaseException:
            remove_placement_group(group)
            raise
        self.group = group

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Return Ray's options of a process; empty for a process that reserves nothing."""
        if self.group is None or (role, number) not in self._indices:
            return {}
        index = self._indices[role, number]
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, index)}


def _wait(group: PlacementGroup, timeout: float, console: Terminal, report_seconds: float) -> None:
    began = time.monotonic()
    due = report_seconds
    while not group.wait(LOOK_SECONDS):
        waited = time.monotonic() - began
        if waited > timeout:
            raise RunFailed(
                f"the cluster had no free resources for all processes of this run within "
                f"deploy.start_timeout_seconds = {timeout:g}; {_free()}"
            )
        if waited > due:
            console.say(f"waiting for free resources on the cluster for {waited:.0f} s; {_free()}")
            due += REPORT_AGAIN_SECONDS


def _free() -> str:
    """Describe the resources of each node that nobody holds at the moment."""
    free = available_resources_per_node()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return "free now are " + "; ".join(
        f"{address}: {_amounts(free.get(node_id, {}))}" for node_id, address in nodes.items()
    )


def _amounts(free: dict[str, float]) -> str:
    """Format as "2 CPU, 1 GPU", without memory, names of nodes and resources of groups."""
    own = {
        kind: amount
        for kind, amount in sorted(free.items())
        if "memory" not in kind and ":" not in kind and "_group_" not in kind
    }
    return ", ".join(f"{amount:g} {kind}" for kind, amount in own.items()) or "nothing"
