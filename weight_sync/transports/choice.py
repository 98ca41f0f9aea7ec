"""Makes the transport that a recipe names. What it costs to import is paid by who uses it."""

from pathlib import Path

from weight_sync.config import WeightSyncConfig
from weight_sync.transport import Transport


def make_transport(config: WeightSyncConfig) -> Transport:
    """The transport of this process, publisher's or receiver's.

    Raises:
        InputError: The folder cannot be made.
    """
    if config.transport == "object_store":
        from weight_sync.transports.ray_object_store import ObjectStoreTransport

        return ObjectStoreTransport(timeout=config.timeout_seconds)
    if config.transport == "filesystem" and config.folder is not None:
        from weight_sync.transports.filesystem import FilesystemTransport

        return FilesystemTransport(Path(config.folder))
    from weight_sync.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport()
