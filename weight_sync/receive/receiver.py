"""The receiver brings every new version into one engine.

    newest ─▶ check against the engine's tensors ─▶ stage: open and verify    engine generates
           ─▶ prepare: load as much as possible beside the old weights        engine generates
           ─▶ permit                                                          engine generates
           ─▶ pause ─▶ load ─▶ resume                                         engine stands still
           ─▶ report, which returns the permit ─▶ on_version                  engine generates

The newest version wins; the one that the engine serves is loaded again, whole, if the learner made
it anew with other weights. A failure before the pause leaves the engine serving its old version. A
failed load leaves it paused, and the loop loads the same version or a newer one until one succeeds.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from headway import clock
from weight_sync.announcements import Announcements, WeightUpdateReport
from weight_sync.errors import (
    DeadlineExceeded,
    IncompatibleWeights,
    LoadFailed,
    StagingError,
    VersionOrderError,
)
from weight_sync.manifest import Manifest, Signature, check_signature
from weight_sync.progress import LEAST_SWAPPED_BYTES_PER_SECOND, Progress, allowance, show
from weight_sync.receive.engine import UpdatableEngine
from weight_sync.receive.staging import StagedWeights, stage
from weight_sync.transports.protocol import Transport

logger = logging.getLogger(__name__)

NEWEST_SECONDS = 10.0
"""Longest wait for a version before it is asked for again; `stop` ends it."""
POLL_SECONDS = 1.0
"""Longest wait for a permit, or for a newer version than one that failed, before others are
checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverOptions:
    """Options of a receiver."""

    expected: Signature | None = None
    """Shapes that the engine takes; None adopts those of the first version that loads."""
    timeout: float = 60.0
    """Longest time in seconds without progress of staging; deadline of preparing, and of a swap.
    Each has the time in addition that its bytes take (`allowance`)."""
    keep_base: bool = False
    """Keep the newest staged version in host memory, as the base of the next delta."""
    retry_seconds: float = 1.0
    """Wait before a failed version is tried again; doubled with every failure in a row, up to 32
    times this. A newer version, or the same one published anew, ends the wait."""
    failed_loads: int = 3
    """Loads that fail one after the other until `run` raises the error: the engine is replaced."""


class Receiver:
    """Keeps one engine, which nobody else may pause, at the newest version."""

    def __init__(
        self,
        engine_id: str,
        engine: UpdatableEngine,
        announcements: Announcements,
        transport: Transport,
        on_version: Callable[[int], Awaitable[None]] | None = None,
        options: ReceiverOptions = ReceiverOptions(),
    ) -> None:
        self.engine_id = engine_id
        self.version: int | None = None
        """The version that the engine serves; None until its first update (STALE)."""
        self.paused = False
        """True while a failed load keeps the engine paused."""
        self._failed_loads = 0
        self._engine = engine
        self._announcements = announcements
        self._transport = transport
        self._on_version = on_version
        self._options = options
        self._failed: Manifest | None = None
        """The version that failed last; None if the last one was taken."""
        self._failures, self._retry_at = 0, 0.0
        self._expected = options.expected
        self._digest: str | None = None
        """Digest of the weights that the engine serves."""
        self._base: StagedWeights | None = None
        self._resending: asyncio.Future[None] | None = None
        """Done when the engine has taken a version as `resend` wants it; None if nobody waits."""
        self._resent = asyncio.Event()
        """Wakes the loop for `resend`."""
        self._attempt: WeightUpdateReport

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the announcements until `stop` is set; a swap that has begun is finished.

        Raises what `update` does, DeadlineExceeded if the engine hung, and the engine's own errors:
        it cannot be repaired.
        """
        while not stop.is_set():
            manifest = await self._next(stop)
            if manifest is None:
                continue
            report = await self.update(manifest, stop)
            if report is None:
                continue
            wait = self._options.retry_seconds * 2 ** min(self._failures, 5) if report.error else 0
            self._failed = manifest if report.error else None
            self._failures = self._failures + 1 if report.error else 0
            self._retry_at = time.monotonic() + wait

    async def _next(self, stop: asyncio.Event) -> Manifest | None:
        """Wait for a version to take; None if it must be looked for again."""
        served = -1 if self.version is None or self._resending is not None else self.version
        wait = self._retry_at - time.monotonic()
        failed = self._failed if wait > 0 else None
        if failed is None:
            known, seconds = (served, self._digest), NEWEST_SECONDS
        else:
            known, seconds = (failed.version, None), min(POLL_SECONDS, wait)
        manifest = await newer(self._announcements, known, seconds, stop, self._resent)
        self._resent.clear()
        if manifest is None and failed is not None:
            # A learner that was made again may have published it anew, or an older version.
            manifest = await self._announcements.newest(served, 0.0, self._digest)
            if manifest is not None and manifest.created_at == failed.created_at:
                return None
        return manifest

    async def resend(self) -> None:
        """Replace all weights, if need be by those of the version that is served already.

        The version is fetched whole and loaded in a pause, without delta and preparation. Returns
        when the engine serves it.
        """
        if self._resending is None:
            self._resending = asyncio.get_running_loop().create_future()
            self._resent.set()
        await asyncio.shield(self._resending)

    async def update(
        self, manifest: Manifest, stop: asyncio.Event | None = None
    ) -> WeightUpdateReport | None:
        """Verify one version, then swap it in; a failure that may be retried is reported.

        Returns None if a newer version or `stop` came before the permit. Raises IncompatibleWeights
        if the engine serves nothing yet and cannot take these weights, and LoadFailed if several
        loads failed in a row.
        """
        resending = self._resending
        made_anew = manifest.version == self.version and manifest.digest != self._digest
        again = resending is not None or made_anew
        self._attempt = WeightUpdateReport(
            engine_id=self.engine_id,
            version=manifest.version,
            published_at=manifest.created_at,
            bytes=manifest.nbytes,
            full_bytes=manifest.nbytes,
            changed=manifest.changed,
            seeding=self.version is None,
        )
        try:
            staged = await self._stage(manifest, again=again)
        except (StagingError, IncompatibleWeights, VersionOrderError) as error:
            report = await self._report(error)
            if self.version is None and isinstance(error, IncompatibleWeights):
                raise
            return report
        self._note(staged_at=clock.now(), codec=staged.codec, bytes=staged.fetched)
        try:
            if not again:
                await self._prepare(staged)
            if not await self._permitted(manifest.version, stop):
                return None
            try:
                await self._swap(staged)
            except LoadFailed as error:
                self._failed_loads += 1
                report = await self._report(error)
                if self._failed_loads < self._options.failed_loads:
                    return report
                raise LoadFailed(f"{self._failed_loads} loads failed, the last: {error}") from error
            except BaseException as error:
                await self._report(error)
                raise
        finally:
            self._keep_or_close(staged)
        self.version, self._failed_loads = manifest.version, 0
        self._expected = {**(self._expected or {}), **manifest.signature}
        self._digest = manifest.digest
        report = await self._report(None)
        if resending is not None:
            resending.set_result(None)
            self._resending = None
        if self._on_version is not None:
            await self._on_version(manifest.version)
        return report

    def close(self) -> None:
        """Release the base of the next delta."""
        if self._base is not None:
            self._base.close()
            self._base = None

    def _keep_or_close(self, staged: StagedWeights) -> None:
        if self._options.keep_base:
            self.close()
            self._base = staged
        else:
            staged.close()

    async def _stage(self, manifest: Manifest, *, again: bool) -> StagedWeights:
        """Run every check that does not touch the engine; see `resend` for `again`."""
        served = -1 if self.version is None else self.version
        if manifest.version < served or (manifest.version == served and not again):
            raise VersionOrderError(
                f"version {manifest.version} was offered to {self.engine_id}, which serves "
                f"{self.version} already"
            )
        if self._expected is not None:
            check_signature(manifest, self._expected)
        loop, progress = asyncio.get_running_loop(), Progress(self._options.timeout)
        base = None if again else self._base
        staging = loop.run_in_executor(None, stage, manifest, self._transport, base, progress)
        try:
            while not staging.done():
                if late := progress.late():
                    raise StagingError(f"version {manifest.version} was not verified {late}")
                await asyncio.wait({staging}, timeout=progress.remaining())
            return staging.result()
        except BaseException:
            staging.add_done_callback(_close_staged)  # the thread goes on
            raise
        finally:
            del staging  # its error would refer to this frame, and so keep the buckets open

    async def _prepare(self, staged: StagedWeights) -> None:
        begin = time.perf_counter()
        deadline = allowance(self._options.timeout, self._loaded_bytes(staged.manifest))
        try:
            async with asyncio.timeout(deadline):
                await self._engine.prepare(staged)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.engine_id} did not prepare version {staged.manifest.version} within "
                f"{show(deadline)} s"
            ) from error
        self._note(prepare_seconds=time.perf_counter() - begin)

    def _loaded_bytes(self, manifest: Manifest) -> int:
        """Return the bytes that the engine loads, whole weights even for an adapter."""
        if manifest.adapter is None or self._expected is None:
            return manifest.nbytes
        return 4 * sum(math.prod(shape) for _, shape in self._expected.values())

    async def _permitted(self, version: int, stop: asyncio.Event | None) -> bool:
        """Wait for a permit; False if a newer version or `stop` came first."""
        while not await self._announcements.acquire_swap(self.engine_id, POLL_SECONDS):
            stopped = stop is not None and stop.is_set()
            if stopped or await self._announcements.newest(version, 0.0) is not None:
                return False
        return True

    async def _swap(self, staged: StagedWeights) -> None:
        """Pause, load and resume under one deadline, and measure each."""
        version, nbytes = staged.manifest.version, self._loaded_bytes(staged.manifest)
        deadline = allowance(self._options.timeout, nbytes, LEAST_SWAPPED_BYTES_PER_SECOND)
        self._note(swap_started_at=clock.now())
        try:
            async with asyncio.timeout(deadline):
                begin = time.perf_counter()
                if not self.paused:
                    await self._engine.pause()
                    self.paused = True
                paused = time.perf_counter()
                self._note(pause_seconds=paused - begin)
                try:
                    await self._engine.load(staged, version)
                finally:
                    loaded = time.perf_counter()
                    self._note(load_seconds=loaded - paused)
                await self._engine.resume()
                self.paused = False
                self._note(resume_seconds=time.perf_counter() - loaded)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"{self.engine_id} did not take version {version} within "
                f"{show(deadline)} s (paused after {self._attempt.pause_seconds:.3f} s, "
                f"loading took {self._attempt.load_seconds:.3f} s)"
            ) from error
        self._note(swap_finished_at=clock.now())

    def _note(self, **changes: Any) -> None:
        self._attempt = replace(self._attempt, **changes)

    async def _report(self, error: BaseException | None) -> WeightUpdateReport:
        """Report the current attempt, which returns its permit."""
        if error is not None:
            message, version = f"{type(error).__name__}: {error}", self._attempt.version
            self._note(error=message)
            logger.warning("%s did not take version %d: %s", self.engine_id, version, message)
        await self._announcements.report(self._attempt)
        return self._attempt


async def newer(
    announcements: Announcements,
    served: tuple[int, str | None],
    timeout: float,
    *events: asyncio.Event,
) -> Manifest | None:
    """Wait as `Announcements.newest` does, beyond version and digest `served`; None at an event."""
    after, digest = served
    asked = asyncio.ensure_future(announcements.newest(after, timeout, digest))
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([asked, *waits], return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        for task in (asked, *waits):
            task.cancel()


def _close_staged(staging: asyncio.Future[StagedWeights]) -> None:
    """Close a version that was staged after its deadline."""
    if not staging.cancelled() and staging.exception() is None:
        staging.result().close()
