"""Builds the transport and the publisher that a recipe names; heavy imports happen on use."""

from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.config import WeightSyncConfig
from weight_sync.transports.protocol import Transport

if TYPE_CHECKING:
    from weight_sync.publish.background_publisher import BackgroundPublisher
    from weight_sync.ray_broadcaster import BroadcasterClient


def make_transport(config: WeightSyncConfig) -> Transport:
    """Build the staged transport of this process, for a publisher or a receiver."""
    if config.transport == "object_store":
        from weight_sync.transports.ray_object_store import ObjectStoreTransport

        return ObjectStoreTransport(timeout=config.timeout_seconds)
    if config.transport == "filesystem" and config.folder is not None:
        from weight_sync.transports.filesystem import FilesystemTransport

        return FilesystemTransport(Path(config.folder))
    from weight_sync.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport()


def make_publisher(
    config: WeightSyncConfig, broadcaster: "BroadcasterClient"
) -> "BackgroundPublisher":
    """Build the learner's publisher for any transport."""
    if not config.staged:
        from weight_sync.direct.ray_links import make_direct_publisher

        return make_direct_publisher(config, broadcaster)
    from headway.ray_service import GIVE_UP_SECONDS
    from weight_sync.publish.snapshot import wire_dtype
    from weight_sync.publish.staged_publisher import StagedPublisher

    publisher = StagedPublisher(
        make_transport(config),
        broadcaster.announce,
        config.bucket_bytes,
        timeout=config.timeout_seconds,
        codec=config.codec,
        wire_dtype=wire_dtype(config),
    )
    publisher.announce_seconds = GIVE_UP_SECONDS
    return publisher
