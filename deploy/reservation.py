"""Room on a joined cluster for all processes of a run at once, as a placement group of Ray.

Two runs that each hold half of what both need would wait for each other; a placement group is given
out whole or not at all. A cluster that was started for the run has nobody else, and no group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.errors import RunFailed
from deploy.placement import Want, bundles
from deploy.progress import Screen

SAID_SECONDS = 3.0
"""Waits for room that are shorter are nobody's concern."""


class Reservation:
    """The bundles that a run holds until its driver ends.

    Args:
        wanted: The processes of each role; those that ask for nothing hold nothing.
        timeout: Seconds until others must have made room.
        screen: Told of a wait.

    Raises:
        RunFailed: They have not; says what is free.
    """

    def __init__(self, wanted: Sequence[Want], timeout: float, screen: Screen) -> None:
        asked = bundles(wanted)
        self._places = {(each.role, each.number): at for at, each in enumerate(asked)}
        self._group: PlacementGroup | None = None
        if not asked:
            return
        group = placement_group(
            [each.resources for each in asked],
            strategy="PACK",
            bundle_label_selector=[each.labels for each in asked],
        )
        with _removed_unless_ready(group):
            if not group.wait(min(SAID_SECONDS, timeout)):
                screen.say(f"waiting for room on the cluster: {_free()}")
                if not group.wait(timeout):
                    raise RunFailed(
                        f"other jobs left no room on the cluster for all {len(asked)} processes of "
                        f"this run within deploy.start_timeout_seconds = {timeout:g}: {_free()}"
                    )
        self._group = group

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Ray's options of a process that has its place here; none of one that reserves nothing."""
        if self._group is None or (role, number) not in self._places:
            return {}
        place = self._places[role, number]
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, place)}


@contextmanager
def _removed_unless_ready(group: PlacementGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove_placement_group(group)
        raise


def _free() -> str:
    """What nobody holds at the moment, of the whole cluster."""
    free = ray.available_resources()
    kinds = [kind for kind in sorted(ray.cluster_resources()) if ":" not in kind]
    shown = ", ".join(
        f"{free.get(kind, 0.0):g} {kind}"
        for kind in kinds
        if "memory" not in kind and "_group_" not in kind
    )
    return f"free now are {shown}"
