"""Tells receivers of new versions and decides how many of them swap at once.

A plain asyncio object that belongs to one event loop; `ray_broadcaster` puts it into a Ray actor.
It carries manifests, never weights. At most max(1, floor(update_fraction · engines)) permits are
out at a time, and one whose holder says nothing for `permit_seconds` is void.
"""

import asyncio
import math
import time
from collections.abc import Callable

from weight_sync.announcements import SwapReport
from weight_sync.errors import InputError, VersionOrderError
from weight_sync.manifest import Manifest


class Broadcaster:
    """The newest manifest, the swap permits and the reports of a run (`Announcements`)."""

    def __init__(
        self,
        update_fraction: float,
        engines: int,
        *,
        permit_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < update_fraction <= 1 or engines < 1:
            raise InputError(
                f"update_fraction is {update_fraction} and engines is {engines}; expected a "
                "fraction in (0, 1] of at least one engine"
            )
        self.permits = max(1, math.floor(update_fraction * engines))
        self._permit_seconds = permit_seconds
        self._clock = clock
        self._manifest: Manifest | None = None
        self._expiry: dict[str, float] = {}
        self._reports: list[SwapReport] = []
        self._changed = asyncio.Condition()

    def __repr__(self) -> str:
        return "broadcaster"

    async def announce(self, manifest: Manifest) -> None:
        """Makes a version known. The newest one again replaces where its bytes are.

        Raises:
            VersionOrderError: A newer version is known already.
        """
        if self._manifest is not None and manifest.version < self._manifest.version:
            raise VersionOrderError(
                f"version {manifest.version} was announced after {self._manifest.version}"
            )
        async with self._changed:
            self._manifest = manifest
            self._changed.notify_all()

    async def newest(self, after: int, timeout: float) -> Manifest | None:
        """See `Announcements.newest`."""

        def known() -> bool:
            return self._manifest is not None and self._manifest.version > after

        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(known)
                return self._manifest
        except TimeoutError:
            return None

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        """See `Announcements.acquire_swap`; a holder that asks again keeps its permit."""
        deadline = self._clock() + timeout
        async with self._changed:
            while True:
                now = self._clock()
                self._expiry = {held: end for held, end in self._expiry.items() if end > now}
                if engine_id in self._expiry or len(self._expiry) < self.permits:
                    self._expiry[engine_id] = now + self._permit_seconds
                    return True
                wake = min(deadline, *self._expiry.values())
                if now >= deadline:
                    return False
                try:
                    async with asyncio.timeout(wake - now):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def report(self, report: SwapReport) -> None:
        """See `Announcements.report`."""
        async with self._changed:
            self._reports.append(report)
            self._expiry.pop(report.engine_id, None)
            self._changed.notify_all()

    async def release(self, engine_id: str) -> None:
        """Gives the permit back of an engine that is gone, if it holds one."""
        async with self._changed:
            self._expiry.pop(engine_id, None)
            self._changed.notify_all()

    async def reports(self, since: int) -> list[SwapReport]:
        """The reports from the `since`-th on, in the order they came."""
        return self._reports[since:]
