"""Ways in which versions are sent, and the figures of updates by each."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness.record import Record

if TYPE_CHECKING:
    from weight_sync.transports.protocol import Transport

COLUMNS = {
    "publish": ("publish", "{:.4f}"),
    "prepare": ("prepare", "{:.4f}"),
    "stall": ("stall", "{:.4f}"),
    "serving": ("serving", "{:.4f}"),
    "bytes": ("bytes", "{:,.0f}"),
}
"""Columns of every table of updates."""
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Sending:
    """Settings by which versions are sent."""

    transport: str
    codec: str = "full"
    wire: str = "float32"
    rank: int = 0
    """Rank of an adapter for every linear layer, which alone is sent; 0 sends all weights."""

    @property
    def name(self) -> str:
        """The name in tables and records."""
        sent = f"adapter of rank {self.rank}" if self.rank else self.codec
        return f"{self.transport} {sent} {self.wire}"

    def open(self, folder: Path) -> "Transport":
        """Return the transport of one process; `folder` is that of a filesystem."""
        from weight_sync.transports.filesystem import FilesystemTransport
        from weight_sync.transports.shared_memory import SharedMemoryTransport

        if self.transport == "shared_memory":
            return SharedMemoryTransport()
        return FilesystemTransport(folder)


FULL = Sending("shared_memory")


def medians(raw: Record) -> Record:
    """Return the median of each figure of each sending; those that are not numbers are left out."""
    return {
        name: {key: median(values) for key, values in figures.items() if None not in values}
        for name, figures in raw["ways"].items()
    }
