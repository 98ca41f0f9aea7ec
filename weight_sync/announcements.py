"""The interface between publisher, broadcaster and receivers, and the report of an update."""

from dataclasses import dataclass
from typing import Protocol

from weight_sync.manifest import Manifest
from weight_sync.probe import ProbeReport, Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """One attempt of one engine to take a version; times are epoch seconds on its node."""

    engine_id: str
    version: int
    published_at: float
    """Time at which `publish` was called."""
    bytes: int
    """Bytes fetched for this attempt; those of the whole version if nothing was fetched."""
    full_bytes: int = 0
    codec: str = "full"
    """Form in which the version was fetched: "full" or "delta"."""
    changed: float | None = None
    """Share of elements that differ from the previous version; None if not compared."""
    seeding: bool = False
    """True for the first version of a new engine, which served nothing before."""
    staged_at: float | None = None
    """Time at which every bucket was verified, or, without staging, when the engine was asked to
    pause; None if staging failed."""
    prepare_seconds: float = 0.0
    """Loading done in advance, while the engine generated."""
    swap_started_at: float | None = None
    """Time at which the engine was asked to pause; None if it was not touched."""
    swap_finished_at: float | None = None
    """Time at which the engine generated again; None if it did not."""
    pause_seconds: float = 0.0
    """Time until the engine stood still; 0 if it was not paused or stood still already."""
    load_seconds: float = 0.0
    resume_seconds: float = 0.0
    error: str | None = None
    """None if the engine serves the version."""

    @property
    def serving_seconds(self) -> float | None:
        """Seconds from `publish` until the engine served the version; None if it does not."""
        if self.swap_finished_at is None:
            return None
        return self.swap_finished_at - self.published_at

    @property
    def stalled_seconds(self) -> float:
        """Seconds that generation stood still."""
        return self.pause_seconds + self.load_seconds + self.resume_seconds


class Announcements(Protocol):
    """The methods of the broadcaster that learner and engines call, in-process or over Ray."""

    async def newest(
        self, after: int, timeout: float, digest: str | None = None
    ) -> Manifest | None:
        """Wait for a version above `after`; None if there is none within `timeout` seconds.

        With a `digest`, version `after` itself is an answer if its weights have another digest: the
        learner has gone back to a checkpoint and made it anew.
        """

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        """Wait for a permit to swap; it expires if no report returns it."""

    async def report(self, report: WeightUpdateReport) -> None:
        """Record an attempt and return its permit."""

    async def probe(self, version: int) -> Sequences | None:
        """Return what an engine that serves a version is to score; None if the learner did not."""

    async def probed(self, report: ProbeReport) -> None:
        """Record scores of a version; those of the learner come first."""
