"""The engine's side of transports without staging: does what the learner's `EngineLink` says.

    pause(v) ─▶ transfer(…) ─▶ … ─▶ resume(v) ─▶ on_version(v)

An engine that was paused stays so until the version that it was paused for last is in: what a
transfer that was given up says afterwards has no effect. Leaves out how calls come here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from weight_sync.errors import VersionOrderError


class DirectEngine(Protocol):
    """An engine that somebody else writes weights into."""

    async def pause(self) -> None:
        """Returns when no token is sampled any more; harmless on a paused engine."""
        ...

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        """Calls `method` of its weight-transfer endpoint, under vLLM's name for it.

        Raises:
            LoadFailed: The weights may be a mixture; the engine waits, paused, for a full re-send.
        """
        ...

    async def serve(self, version: int) -> None:
        """What was transferred is this version; tokens sampled after `resume` carry it."""
        ...

    async def resume(self) -> None:
        """Continues every request where it was frozen."""
        ...


class DirectReceiver:
    """Keeps an engine paused while it is written to.

    Args:
        engine: Nobody else may pause it.
        join: Makes the engine known to the learner.
        on_version: Awaited with each version once the engine serves it.
    """

    def __init__(
        self,
        engine: DirectEngine,
        join: Callable[[], Awaitable[None]],
        *,
        on_version: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.version: int | None = None
        """What the engine serves. None: STALE, it has not been given any version yet."""
        self._engine = engine
        self._join = join
        self._on_version = on_version
        self._paused_for: int | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Makes the engine known, and returns when `stop` is set."""
        await self._join()
        await stop.wait()

    def close(self) -> None:
        """Nothing is held between updates."""

    async def pause(self, version: int) -> None:
        """See `direct.EngineLink.pause`.

        Raises:
            VersionOrderError: It was paused for a newer version, or serves one.
        """
        newest = max(self._paused_for or -1, -1 if self.version is None else self.version)
        if version < newest:
            raise VersionOrderError(f"version {version} comes after version {newest}")
        self._paused_for = version
        await self._engine.pause()

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        """See `direct.EngineLink.transfer`.

        Raises:
            VersionOrderError: The engine is not paused.
            LoadFailed: See `DirectEngine.transfer`.
        """
        if self._paused_for is None:
            raise VersionOrderError(f"{method} was asked of an engine that is not paused")
        await self._engine.transfer(method, payload)

    async def resume(self, version: int) -> None:
        """See `direct.EngineLink.resume`."""
        if self._paused_for != version:
            return
        await self._engine.serve(version)
        await self._engine.resume()
        self._paused_for, self.version = None, version
        if self._on_version is not None:
            await self._on_version(version)
