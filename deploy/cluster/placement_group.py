"""Room on a joined cluster for all processes of a run at once, as a placement group of Ray.

Two runs that each hold half of what both need would wait for each other; a placement group is given
out whole or not at all. A cluster that was started for the run has nobody else, and no group.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.placement import ResourceRequest, bundles
from deploy.errors import RunFailed
from deploy.runtime.console import Terminal

LOOK_SECONDS = 1
"""A whole number, as Ray takes it; Ctrl-C is heard between two looks."""
SAID_SECONDS = 3.0
"""Waits for room that are shorter are nobody's concern."""
SAID_AGAIN_SECONDS = 60.0


class Reservation:
    """The bundles that a run holds until its driver ends.

    Args:
        wanted: The processes of each role; those that ask for nothing hold nothing. Where some may
            be on any node, all are spread, otherwise packed.
        timeout: Seconds until others must have made room.
        screen: Told of a wait.

    Raises:
        RunFailed: They have not; says what is free.
    """

    def __init__(self, wanted: Sequence[ResourceRequest], timeout: float, screen: Terminal) -> None:
        asked = bundles(wanted)
        self._places = {(each.role, each.number): at for at, each in enumerate(asked)}
        self._group: PlacementGroup | None = None
        if not asked:
            return
        group = placement_group(
            [each.resources for each in asked],
            strategy="PACK" if all(each.labels for each in asked) else "SPREAD",
            bundle_label_selector=[each.labels for each in asked],
        )
        with _removed_unless_ready(group):
            _wait(group, timeout, screen)
        self._group = group

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Ray's options of a process that has its place here; none of one that reserves nothing."""
        if self._group is None or (role, number) not in self._places:
            return {}
        place = self._places[role, number]
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, place)}


def _wait(group: PlacementGroup, timeout: float, screen: Terminal) -> None:
    began = time.monotonic()
    due = SAID_SECONDS
    while not group.wait(LOOK_SECONDS):
        waited = time.monotonic() - began
        if waited > timeout:
            raise RunFailed(
                f"there was no room on the cluster for all processes of this run within "
                f"deploy.start_timeout_seconds = {timeout:g}; {_free()}"
            )
        if waited > due:
            screen.say(f"waiting for room on the cluster for {waited:.0f} s; {_free()}")
            due += SAID_AGAIN_SECONDS


@contextmanager
def _removed_unless_ready(group: PlacementGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove_placement_group(group)
        raise


def _free() -> str:
    """What nobody holds at the moment, by node."""
    free = available_resources_per_node()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return "free now are " + "; ".join(
        f"{address}: {_amounts(free.get(node_id, {}))}" for node_id, address in nodes.items()
    )


def _amounts(free: dict[str, float]) -> str:
    """As "2 CPU, 1 GPU"; without memory, names of nodes and what groups hold."""
    own = {
        kind: amount
        for kind, amount in sorted(free.items())
        if "memory" not in kind and ":" not in kind and "_group_" not in kind
    }
    return ", ".join(f"{amount:g} {kind}" for kind, amount in own.items()) or "nothing"
