"""What passes between publisher, broadcaster and receivers: swap reports and the seam itself."""

from dataclasses import dataclass
from typing import Protocol

from weight_sync.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """One attempt of one engine to take a version; times are epoch seconds on its node."""

    engine_id: str
    version: int
    published_at: float
    """When `publish` was called."""
    staged_at: float | None
    """When every bucket was verified, or, without staging, when the engine was asked to pause;
    None if staging failed."""
    pause_seconds: float
    """Until the engine stood still; 0 if it never was asked to, or stood already."""
    load_seconds: float
    resume_seconds: float
    swap_started_at: float | None
    """When the engine was asked to pause; None if it was not touched."""
    swap_finished_at: float | None
    """When it generated again; None if it did not."""
    bytes: int
    """What was fetched for this attempt; of the whole version where nothing was."""
    prepare_seconds: float = 0.0
    """What the engine did of the load beforehand, while it generated."""
    seeding: bool = False
    """Whether the engine served nothing before: the first version of a new engine."""
    codec: str = "full"
    """How the version came: "full" or "delta"."""
    full_bytes: int = 0
    """Of the whole version; what `bytes` is to be held against."""
    changed: float | None = None
    """Share of elements that differ from the version before; None where nobody compared."""
    error: str | None = None
    """None: the engine serves the version."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds that generation stood still."""
        return self.pause_seconds + self.load_seconds + self.resume_seconds


class Announcements(Protocol):
    """What a receiver asks of the broadcaster, in-process or over Ray."""

    async def newest(self, after: int, timeout: float) -> Manifest | None:
        """The newest manifest with a version above `after`; None if none came in time."""
        ...

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        """Whether the engine may swap now; a permit expires if no report gives it back."""
        ...

    async def report(self, report: WeightUpdateReport) -> None:
        """Records an attempt and gives its permit back."""
        ...
