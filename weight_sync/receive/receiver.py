"""Brings every new version into one engine.

    newest ─▶ check against the engine's tensors ─▶ stage: open and verify    engine generates
           ─▶ prepare: what the engine can load beside the old weights        engine generates
           ─▶ permit                                                          engine generates
           ─▶ pause ─▶ load ─▶ resume                                         engine stands still
           ─▶ report, which gives the permit back ─▶ on_version               engine generates

Who waits on whom: `newest` on the publisher; the permit on other engines' reports, or on the
expiry of a dead one's. The newest version wins, those in between are skipped. What fails before
the pause leaves the engine serving what it served; if that is nothing and the weights are those of
another model, the loop ends. A load that fails leaves it paused, and the loop loads again, the same
version or a newer one, until one succeeds.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weight_sync.announcements import Announcements, WeightUpdateReport
from weight_sync.errors import (
    DeadlineExceeded,
    IncompatibleWeights,
    LoadFailed,
    StagingError,
    VersionOrderError,
)
from weight_sync.manifest import Manifest, Signature, check_signature
from weight_sync.receive.engine import UpdatableEngine
from weight_sync.receive.staging import StagedWeights, stage
from weight_sync.transports.protocol import Transport

logger = logging.getLogger(__name__)

NEWEST_SECONDS = 10.0
"""Longest wait for a version before it is asked for again; `stop` ends it."""
POLL_SECONDS = 1.0
"""Longest wait for a permit before `stop` is looked at again."""


@dataclass(slots=True)
class _Attempt:
    """One attempt, filled as it proceeds."""

    seeding: bool
    codec: str = "full"
    moved: int | None = None
    staged_at: float | None = None
    prepare: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    pause: float = 0.0
    load: float = 0.0
    resume: float = 0.0


class Receiver:
    """Keeps one engine at the newest version.

    Args:
        engine_id: Name in permits and reports.
        engine: What is updated; nobody else may pause it.
        announcements: Versions, permits, reports.
        transport: Opens buckets.
        expected: Dtypes and shapes that the engine takes; None learns them from the first version
            that loads. Dtypes are learned from it in any case.
        on_version: Awaited with each version once the engine serves it.
        timeout: Deadline in seconds of staging, of preparing, and of pause, load and resume
            together.
        keep_base: Whether the newest staged version stays in host memory, so that the next one can
            come as a delta.
        retry_seconds: Wait before a version that failed is tried again, doubled up to 32 times as
            long while it keeps failing; a newer version ends the wait.
    """

    def __init__(
        self,
        engine_id: str,
        engine: UpdatableEngine,
        announcements: Announcements,
        transport: Transport,
        *,
        expected: Signature | None = None,
        on_version: Callable[[int], Awaitable[None]] | None = None,
        timeout: float = 60.0,
        keep_base: bool = False,
        retry_seconds: float = 1.0,
    ) -> None:
        self.engine_id = engine_id
        self.version: int | None = None
        """What the engine serves. None: STALE, it has not been given any version yet."""
        self.paused = False
        """Whether a failed load keeps the engine paused."""
        self._engine = engine
        self._announcements = announcements
        self._transport = transport
        self._expected = expected
        self._on_version = on_version
        self._timeout = timeout
        self._keep_base = keep_base
        self._base: StagedWeights | None = None
        self._retry_seconds = retry_seconds

    async def run(self, stop: asyncio.Event) -> None:
        """Follows the announcements until `stop` is set; a swap that has begun is finished.

        Raises:
            IncompatibleWeights: The first version is of another model; no later one would fit.
            DeadlineExceeded: The engine hung; its state is unknown.
            Exception: Whatever the engine raised other than `LoadFailed`; it is beyond repair.
        """
        failed, failures, retry_at = -1, 0, 0.0
        while not stop.is_set():
            served = -1 if self.version is None else self.version
            waits = time.monotonic() < retry_at
            manifest = await newer(
                self._announcements,
                failed if waits else served,
                min(NEWEST_SECONDS, retry_at - time.monotonic()) if waits else NEWEST_SECONDS,
                stop,
            )
            if manifest is None:
                continue
            report = await self.update(manifest, stop)
            if report is not None and report.error:
                retry_at = time.monotonic() + self._retry_seconds * 2 ** min(failures, 5)
                failed, failures = manifest.version, failures + 1
            elif report is not None:
                failures, retry_at = 0, 0.0

    async def update(
        self, manifest: Manifest, stop: asyncio.Event | None = None
    ) -> WeightUpdateReport | None:
        """Verifies one version, then swaps it in; what failed and may be retried is reported.

        Returns:
            The report, or None if a newer version or `stop` came before the permit.

        Raises:
            IncompatibleWeights: The engine serves nothing yet, and cannot take these.
        """
        attempt = _Attempt(seeding=self.version is None)
        try:
            staged = await self._stage(manifest)
        except (StagingError, IncompatibleWeights, VersionOrderError) as error:
            report = await self._report(manifest, attempt, error)
            if self.version is None and isinstance(error, IncompatibleWeights):
                raise
            return report
        attempt.staged_at = time.time()
        attempt.codec, attempt.moved = staged.codec, staged.moved
        try:
            await self._prepare(staged, attempt)
            if not await self._permitted(manifest.version, stop):
                return None
            try:
                await self._swap(staged, attempt)
            except LoadFailed as error:
                return await self._report(manifest, attempt, error)
            except BaseException as error:
                await self._report(manifest, attempt, error)
                raise
        finally:
            self._done_with(staged)
        self.version = manifest.version
        self._expected = manifest.signature
        report = await self._report(manifest, attempt, None)
        if self._on_version is not None:
            await self._on_version(manifest.version)
        return report

    def close(self) -> None:
        """Gives back what is kept for the next delta."""
        if self._base is not None:
            self._base.close()
            self._base = None

    def _done_with(self, staged: StagedWeights) -> None:
        """Closes a version, or keeps it in the place of the one kept before."""
        if self._keep_base:
            self.close()
            self._base = staged
        else:
            staged.close()

    async def _stage(self, manifest: Manifest) -> StagedWeights:
        """Everything that can be refused without touching the engine."""
        if self.version is not None and manifest.version <= self.version:
            raise VersionOrderError(
                f"version {manifest.version} was offered to {self.engine_id}, which serves "
                f"{self.version} already"
            )
        if self._expected is not None:
            check_signature(manifest, self._expected)
        staging = asyncio.get_running_loop().run_in_executor(
            None, stage, manifest, self._transport, self._base
        )
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    return await asyncio.shield(staging)
                except asyncio.CancelledError:  # the deadline's own too: the thread goes on
                    staging.add_done_callback(_give_back)
                    raise
        except TimeoutError:
            raise StagingError(
                f"version {manifest.version} was not verified within {self._timeout} s"
            ) from None
        finally:
            del staging  # its error would refer to this frame, and so keep the buckets open

    async def _prepare(self, staged: StagedWeights, attempt: _Attempt) -> None:
        """Has the engine do beforehand what it can, under a deadline of its own."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._engine.prepare(staged)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.engine_id} did not prepare version {staged.manifest.version} within "
                f"{self._timeout} s"
            ) from error
        attempt.prepare = time.perf_counter() - begin

    async def _permitted(self, version: int, stop: asyncio.Event | None) -> bool:
        """Waits for a permit; False if a newer version or `stop` came first."""
        while not await self._announcements.acquire_swap(self.engine_id, POLL_SECONDS):
            if stop is not None and stop.is_set():
                return False
            if await self._announcements.newest(version, 0.0) is not None:
                return False
        return True

    async def _swap(self, staged: StagedWeights, attempt: _Attempt) -> None:
        """Pause, load, resume; timed, under one deadline."""
        attempt.started_at = time.time()
        version = staged.manifest.version
        try:
            async with asyncio.timeout(self._timeout):
                begin = time.perf_counter()
                if not self.paused:
                    await self._engine.pause()
                    self.paused = True
                paused = time.perf_counter()
                attempt.pause = paused - begin
                try:
                    await self._engine.load(staged, version)
                finally:
                    loaded = time.perf_counter()
                    attempt.load = loaded - paused
                await self._engine.resume()
                self.paused = False
                attempt.resume = time.perf_counter() - loaded
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"{self.engine_id} did not take version {version} within {self._timeout} s "
                f"(paused after {attempt.pause:.3f} s, loading took {attempt.load:.3f} s)"
            ) from error
        attempt.finished_at = time.time()

    async def _report(
        self, manifest: Manifest, attempt: _Attempt, error: BaseException | None
    ) -> WeightUpdateReport:
        """Records an attempt and gives its permit back."""
        report = WeightUpdateReport(
            engine_id=self.engine_id,
            version=manifest.version,
            published_at=manifest.created_at,
            staged_at=attempt.staged_at,
            prepare_seconds=attempt.prepare,
            pause_seconds=attempt.pause,
            load_seconds=attempt.load,
            resume_seconds=attempt.resume,
            swap_started_at=attempt.started_at,
            swap_finished_at=attempt.finished_at,
            bytes=manifest.nbytes if attempt.moved is None else attempt.moved,
            seeding=attempt.seeding,
            codec=attempt.codec,
            full_bytes=manifest.nbytes,
            changed=manifest.changed,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        if report.error:
            logger.warning(
                "%s did not take version %d: %s", self.engine_id, report.version, report.error
            )
        await self._announcements.report(report)
        return report


async def newer(
    announcements: Announcements, after: int, timeout: float, stop: asyncio.Event
) -> Manifest | None:
    """See `Announcements.newest`; None once `stop` is set."""
    asked = asyncio.ensure_future(announcements.newest(after, timeout))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        asked.cancel()
        stopped.cancel()


def _give_back(staging: asyncio.Future[StagedWeights]) -> None:
    """Closes what a thread staged after nobody waited for it any more."""
    if not staging.cancelled() and staging.exception() is None:
        staging.result().close()
