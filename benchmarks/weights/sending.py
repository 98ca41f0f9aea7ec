"""Ways in which versions are sent, and the figures of updates by each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.harness.record import Record
from benchmarks.harness.synthetic_load import Size
from weight_sync.config import WeightSyncConfig
from weight_sync.factory import make_transport
from weight_sync.transports.protocol import Transport

UPDATE_COLUMNS = {
    "publish": ("publish", "{:.4f}"),
    "prepare": ("prepare", "{:.4f}"),
    "stall": ("stall", "{:.4f}"),
    "serving": ("serving", "{:.4f}"),
    "bytes": ("bytes", "{:,.0f}"),
}
"""Columns of every table of updates."""


@dataclass(frozen=True)
class Sending:
    """Settings by which versions are sent."""

    transport: Literal["shared_memory", "filesystem"]
    codec: Literal["full", "delta"] = "full"
    wire: str = "float32"
    rank: int = 0
    """Rank of an adapter for every linear layer, which alone is sent; 0 sends all weights."""

    @property
    def name(self) -> str:
        """The name in tables and records."""
        sent = f"adapter of rank {self.rank}" if self.rank else self.codec
        return f"{self.transport} {sent} {self.wire}"

    def open(self, folder: Path) -> Transport:
        """Return the transport of one process; `folder` is that of a filesystem."""
        own = str(folder) if self.transport == "filesystem" else None
        return make_transport(WeightSyncConfig(transport=self.transport, folder=own))


FULL = Sending("shared_memory")


@dataclass(frozen=True)
class UpdatePlan:
    """Updates that are measured."""

    size: Size
    rounds: int
    """Updates of each sending that count."""
    sendings: Sequence[Sequence[Sending]]
    """Ways of sending; those that stand together take turns."""
    dtype: str = "float32"
    requests: int = 16
    """Number of requests that run throughout."""
    request_tokens: int = 400
    count_seconds: float = 0.0
    """Time after each update in which tokens are counted."""
    loss_windows: int = 0
    """Windows in which tokens are counted with an update every second, and as many with none."""


def medians(raw: Record) -> Record:
    """Return the median of each figure of each sending; those that are not numbers are left out."""
    return {
        name: {key: median(values) for key, values in figures.items() if None not in values}
        for name, figures in raw["ways"].items()
    }
