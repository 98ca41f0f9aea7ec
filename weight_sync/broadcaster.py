"""Tells receivers of new versions and decides how many of them swap at once.

A plain asyncio object that belongs to one event loop; `ray_broadcaster` puts it into a Ray actor.
It carries manifests, never weights. At most max(1, floor(update_fraction · engines)) permits are
out at a time, and one whose holder says nothing for `permit_seconds` is void.
"""

import asyncio
import math
from typing import Any

from weight_sync.announcements import WeightUpdateReport
from weight_sync.errors import InputError, VersionOrderError
from weight_sync.manifest import Manifest
from weight_sync.permits import SwapPermits


class Broadcaster:
    """The newest manifest, the swap permits and the reports of a run (`Announcements`)."""

    def __init__(
        self,
        update_fraction: float,
        engines: int,
        *,
        permit_seconds: float = 60.0,
    ) -> None:
        if not 0 < update_fraction <= 1 or engines < 1:
            raise InputError(
                f"update_fraction is {update_fraction} and engines is {engines}; expected a "
                "fraction in (0, 1] of at least one engine"
            )
        self.permits = max(1, math.floor(update_fraction * engines))
        self._swaps = SwapPermits(self.permits, permit_seconds)
        self._manifest: Manifest | None = None
        self._reports: list[WeightUpdateReport] = []
        self._engines: dict[str, tuple[Any, int]] = {}
        self._announced = asyncio.Condition()

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
        async with self._announced:
            self._manifest = manifest
            self._announced.notify_all()

    async def newest(self, after: int, timeout: float) -> Manifest | None:
        """See `Announcements.newest`."""

        def known() -> bool:
            return self._manifest is not None and self._manifest.version > after

        try:
            async with asyncio.timeout(timeout), self._announced:
                await self._announced.wait_for(known)
                return self._manifest
        except TimeoutError:
            return None

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        """See `Announcements.acquire_swap`; a holder that asks again keeps its permit."""
        return await self._swaps.acquire(engine_id, timeout)

    async def report(self, report: WeightUpdateReport) -> None:
        """See `Announcements.report`."""
        self._reports.append(report)
        self._swaps.give_back(report.engine_id)

    async def release(self, engine_id: str) -> None:
        """Forgets an engine that is gone, and gives its permit back, if it holds one."""
        self._engines.pop(engine_id, None)
        self._swaps.give_back(engine_id)

    async def join(self, engine_id: str, engine: Any, workers: int) -> None:
        """Makes an engine known to a learner that sends to it directly.

        Args:
            engine_id: Its name; another engine under it takes its place.
            engine: How it is called; means nothing here.
            workers: Processes that hold a part of its weights.
        """
        self._engines[engine_id] = engine, workers

    async def engines(self) -> dict[str, tuple[Any, int]]:
        """Who has joined and was not released: what each was made known as."""
        return self._engines

    async def reports(self, since: int) -> list[WeightUpdateReport]:
        """The reports from the `since`-th on, in the order they came."""
        return self._reports[since:]
