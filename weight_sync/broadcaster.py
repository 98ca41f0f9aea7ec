"""The broadcaster announces versions to receivers and limits how many engines swap at once.

It carries manifests, never weights. At most max(1, floor(update_fraction · engines)) permits are
held at a time, granted in the order of the requests. After its death another one is told the newest
version by the publisher, and asked for permits by the receivers.
"""

import asyncio
import math
from collections import deque
from typing import Any

from headway.errors import InputError
from weight_sync.announcements import Announcements, WeightUpdateReport
from weight_sync.errors import VersionOrderError
from weight_sync.manifest import Manifest
from weight_sync.probe import LEARNER, ProbeReport, Sequences
from weight_sync.progress import LEAST_SWAPPED_BYTES_PER_SECOND, allowance

RECENT = 100
"""Newest reports among which one that came before is not counted again."""


class SwapPermits:
    """A semaphore whose permits end after `seconds`, and the `allowance` for what they load."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds
        self._free = asyncio.Semaphore(count)
        self._surplus = 0
        """Permits that end when they are given back, since `count` was lowered."""
        self._held: dict[str, asyncio.TimerHandle] = {}

    async def acquire(self, holder: str, timeout: float, nbytes: int = 0) -> bool:
        """Wait `timeout` seconds for a permit, or renew a holder's; return True if granted."""
        if holder not in self._held:
            try:
                async with asyncio.timeout(timeout):
                    await self._free.acquire()
            except TimeoutError:
                return False
            if holder in self._held:  # another request of this holder was granted meanwhile
                self._release()
        if earlier := self._held.get(holder):
            earlier.cancel()
        loop = asyncio.get_running_loop()
        seconds = allowance(self._seconds, nbytes, LEAST_SWAPPED_BYTES_PER_SECOND)
        self._held[holder] = loop.call_later(seconds, self.give_back, holder)
        return True

    def give_back(self, holder: str) -> None:
        """End a permit, if the holder has one, and grant it to the next in the queue."""
        timer = self._held.pop(holder, None)
        if timer is not None:
            timer.cancel()
            self._release()

    async def resize(self, count: int) -> None:
        """Change the number of permits; holders beyond a lower one keep theirs until its end."""
        before, self._count = self._count, count
        for _ in range(before, count):
            self._release()
        for _ in range(count, before):
            if self._free.locked():
                self._surplus += 1
            else:
                await self._free.acquire()

    def _release(self) -> None:
        if self._surplus:
            self._surplus -= 1
        else:
            self._free.release()


class Broadcaster(Announcements):
    """The newest manifest, the swap permits and the update reports of a run."""

    def __init__(
        self, update_fraction: float, engines: int, *, permit_seconds: float = 60.0
    ) -> None:
        if not 0 < update_fraction <= 1 or engines < 1:
            raise InputError(
                f"update_fraction is {update_fraction} and engines is {engines}; expected a "
                "fraction in (0, 1] of at least one engine"
            )
        self._fraction = update_fraction
        self.permits = max(1, math.floor(update_fraction * engines))
        self._swaps = SwapPermits(self.permits, permit_seconds)
        self._manifest: Manifest | None = None
        self._epoch = 0
        self._reports: list[WeightUpdateReport] = []
        self._engines: dict[str, tuple[Any, int]] = {}
        self._scored: deque[ProbeReport] = deque(maxlen=RECENT)
        """Newest versions that the learner has scored."""
        self._probes: list[ProbeReport] = []
        self._announced = asyncio.Condition()

    def __repr__(self) -> str:
        return "broadcaster"

    async def announce(self, manifest: Manifest, epoch: int = 0) -> None:
        """Announce a version; the newest one may be announced again with new locations.

        A learner that was made again has a higher `epoch`, and begins with an older version. Raises
        VersionOrderError after a newer version of this epoch, or any of a later one.
        """
        if epoch < self._epoch:
            raise VersionOrderError(
                f"version {manifest.version} was announced by a learner of epoch {epoch}, after "
                f"that of epoch {self._epoch} took its place"
            )
        newest = self._manifest
        if newest is not None and epoch == self._epoch and manifest.version < newest.version:
            raise VersionOrderError(
                f"version {manifest.version} was announced after {newest.version}"
            )
        async with self._announced:
            self._manifest, self._epoch = manifest, epoch
            self._announced.notify_all()

    async def newest(
        self, after: int, timeout: float, digest: str | None = None
    ) -> Manifest | None:
        def is_new() -> bool:
            if self._manifest is None or self._manifest.version < after:
                return False
            other = digest is not None and self._manifest.digest != digest
            return self._manifest.version > after or other

        try:
            async with asyncio.timeout(timeout), self._announced:
                await self._announced.wait_for(is_new)
                return self._manifest
        except TimeoutError:
            return None

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        nbytes = self._manifest.nbytes if self._manifest else 0
        return await self._swaps.acquire(engine_id, timeout, nbytes)

    async def report(self, report: WeightUpdateReport) -> None:
        if report in self._reports[-RECENT:]:
            return  # sent again; its permit was given back before
        self._reports.append(report)
        self._swaps.give_back(report.engine_id)

    async def release(self, engine_id: str) -> None:
        """Forget an engine that has ended, and return its permit if it holds one."""
        self._engines.pop(engine_id, None)
        self._swaps.give_back(engine_id)

    async def resize(self, engines: int) -> None:
        """Let the fraction of another number of engines swap at once."""
        self.permits = max(1, math.floor(self._fraction * engines))
        await self._swaps.resize(self.permits)

    async def join(self, engine_id: str, engine: Any, workers: int) -> None:
        """Register an engine that the learner sends weights to, in place of one of its name.

        `workers` processes hold a part of its weights.
        """
        self._engines[engine_id] = engine, workers

    async def engines(self) -> dict[str, tuple[Any, int]]:
        """Return handle and workers of every engine that has joined and was not released."""
        return self._engines

    async def reports(self, since: int) -> list[WeightUpdateReport]:
        """Return all reports but the first `since`, in order of arrival."""
        return self._reports[since:]

    async def probed(self, report: ProbeReport) -> None:
        self._probes.append(report)
        if report.source == LEARNER:
            self._scored.append(report)

    async def probe(self, version: int) -> Sequences | None:
        return next((it.sequences for it in self._scored if it.version == version), None)

    async def probes(self) -> list[ProbeReport]:
        """Return the scores since the last call, in order of arrival."""
        probes, self._probes = self._probes, []
        return probes
