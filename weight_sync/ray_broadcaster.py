"""The broadcaster as a Ray actor, and its client.

The actor has no state that others do not have too, so Ray restarts it when it dies, and calls whose
answer was lost are repeated. A supervisor counts the restarts and has the learner announce again.
"""

from typing import Any

import ray

from headway.ray_service import MAX_CONCURRENCY, RayService, ServiceProcess, remote
from headway.roles import Role
from weight_sync.announcements import Announcements
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import BroadcasterDied


def create_broadcaster(
    update_fraction: float, engines: int, *, permit_seconds: float = 60.0, **options: Any
) -> "BroadcasterClient":
    """Start a `Broadcaster` on the cluster; `options` are options of its Ray actor."""
    actor = ray.remote(BroadcasterActor).options(
        **{"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY, "max_restarts": -1, **options}
    )
    return BroadcasterClient(actor.remote(update_fraction, engines, permit_seconds=permit_seconds))


class BroadcasterActor(Broadcaster, ServiceProcess):
    """The broadcaster in a process of its own."""


class BroadcasterClient(RayService, Announcements):
    """The methods of `Broadcaster` from any process of the cluster; can be sent to others."""

    role, lost = Role.BROADCASTER, BroadcasterDied

    announce = remote(Broadcaster.announce, fenced=True)
    newest = remote(Broadcaster.newest, wait=lambda after, timeout, digest=None: timeout)
    acquire_swap = remote(Broadcaster.acquire_swap, wait=lambda engine_id, timeout: timeout)
    report = remote(Broadcaster.report)
    release = remote(Broadcaster.release)
    resize = remote(Broadcaster.resize)
    join = remote(Broadcaster.join)
    engines = remote(Broadcaster.engines)
    reports = remote(Broadcaster.reports)
    probed = remote(Broadcaster.probed)
    probe = remote(Broadcaster.probe)
    probes = remote(Broadcaster.probes)
