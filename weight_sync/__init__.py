"""Weight synchronisation: from the learner's memory into engines that keep generating.

    learner ─▶ Publisher ─write─▶ transport ◀─open, verify─ Receiver ─pause, load, resume─▶ engine
                   └─announce─▶ Broadcaster ─newest, permit─▶ ┘

Imports none of the other packages. Names are resolved when first used, so that settings and
errors are there without torch, vLLM or Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weight_sync.announcements import Announcements, SwapReport
    from weight_sync.broadcaster import Broadcaster
    from weight_sync.config import WeightSyncConfig
    from weight_sync.errors import WeightSyncError
    from weight_sync.manifest import Manifest
    from weight_sync.publish.staged_publisher import Publisher
    from weight_sync.ray_broadcaster import BroadcasterClient, create_broadcaster
    from weight_sync.receive.engine import UpdatableEngine
    from weight_sync.receive.receiver import Receiver
    from weight_sync.receive.staging import StagedWeights
    from weight_sync.transports.protocol import Transport
    from weight_sync.transports.shared_memory import SharedMemoryTransport

__all__ = [
    "Announcements",
    "Broadcaster",
    "BroadcasterClient",
    "Manifest",
    "Publisher",
    "Receiver",
    "SharedMemoryTransport",
    "StagedWeights",
    "SwapReport",
    "Transport",
    "UpdatableEngine",
    "WeightSyncConfig",
    "WeightSyncError",
    "create_broadcaster",
]

_HOMES = {
    "Announcements": "announcements",
    "Broadcaster": "broadcaster",
    "BroadcasterClient": "ray_broadcaster",
    "Manifest": "manifest",
    "Publisher": "publisher",
    "Receiver": "receiver",
    "SharedMemoryTransport": "transports.shared_memory",
    "StagedWeights": "staging",
    "SwapReport": "announcements",
    "Transport": "transport",
    "UpdatableEngine": "engine",
    "WeightSyncConfig": "config",
    "WeightSyncError": "errors",
    "create_broadcaster": "ray_broadcaster",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
