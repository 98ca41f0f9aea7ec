"""The engine's side of transports without staging: does what the learner's `EngineLink` says.

    pause(v) ─▶ transfer(…) ─▶ … ─▶ resume ─▶ on_version(v), which `run` awaits

All calls of one attempt carry its token. What was written before an attempt that fails is a
mixture, and vLLM's state of loading with it, so there is no second one: `run` ends with the error,
and whoever supervises makes the engine again, which joins again and is sent the newest version.
Leaves out how calls come here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from weight_sync.errors import (
    DeadlineExceeded,
    IncompatibleWeights,
    LoadFailed,
    NotNow,
    WeightSyncError,
)
from weight_sync.manifest import Signature
from weight_sync.vllm.transfer import FINISH, START, UPDATE, announced


class DirectEngine(Protocol):
    """An engine that somebody else writes weights into. What it raises is the end of it."""

    async def pause(self) -> None:
        """Returns when no token is sampled any more."""
        ...

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        """Calls `method` of its weight-transfer endpoint, under vLLM's name for it."""
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
        expected: Shapes of the tensors that every version must have.
        on_version: Awaited with each version once the engine serves it; no other begins before.
        timeout: Seconds that the engine stands still for at most, should the learner be gone.
    """

    def __init__(
        self,
        engine: DirectEngine,
        join: Callable[[], Awaitable[None]],
        *,
        expected: Signature,
        on_version: Callable[[int], Awaitable[None]] | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.version: int | None = None
        """What the engine serves. None: STALE, it has not been given any version yet."""
        self._engine = engine
        self._join = join
        self._expected = {name: shape for name, (_, shape) in expected.items()}
        self._on_version = on_version
        self._timeout = timeout
        self._attempt: str | None = None
        self._next = -1
        """The version that the open attempt brings."""
        self._came: set[str] = set()
        """Tensors of it so far."""
        self._error: Exception | None = None
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._told: int | None = None
        """The version that `on_version` was told of."""

    async def run(self, stop: asyncio.Event) -> None:
        """Makes the engine known, and returns when `stop` is set.

        Raises:
            LoadFailed: A transfer failed after it had begun; the engine must be made again.
            DeadlineExceeded: One was not ended in time; likewise.
            IncompatibleWeights: The learner's tensors are not those of the engine.
            Exception: Whatever the engine or `on_version` raised.
        """
        await self._join()
        stopped = asyncio.create_task(stop.wait())
        followed = asyncio.create_task(self._follow())
        try:
            await asyncio.wait([stopped, followed], return_when=asyncio.FIRST_COMPLETED)
            if followed.done():
                await followed
        finally:
            stopped.cancel()
            followed.cancel()
            await asyncio.wait([followed])
            self.close()

    def close(self) -> None:
        """Refuses every later call."""
        self._closed = True
        self._end_attempt()

    async def pause(self, version: int, attempt: str) -> int | None:
        """See `direct.EngineLink.pause`.

        Raises:
            NotNow: It serves this version or a newer one, is not done with `on_version`, or ends.
            LoadFailed: Another attempt is open: what the engine holds is a mixture.
        """
        if self._closed or self._error is not None:
            raise NotNow(f"version {version} was refused: the engine is about to end")
        if self._attempt is not None:
            error = LoadFailed(f"version {version} came while version {self._next} was not whole")
            self._fail(error)
            raise error
        if self.version is not None and version <= self.version:
            raise NotNow(f"version {version} was refused: the engine serves {self.version}")
        if self._told != self.version:
            raise NotNow(f"version {version} was refused: version {self.version} is still in use")
        self._attempt, self._next = attempt, version
        self._deadline = asyncio.get_running_loop().call_later(self._timeout, self._late)
        await self._ask(attempt, self._engine.pause)
        return self.version

    async def transfer(self, attempt: str, method: str, payload: dict[str, Any] | None) -> None:
        """See `direct.EngineLink.transfer`.

        Raises:
            NotNow: The attempt is over, or never was.
            IncompatibleWeights: A tensor that the engine does not have, or too few at the end.
        """
        self._check(attempt)
        try:
            self._note(method, payload)
        except WeightSyncError as error:
            self._fail(error)
            raise
        await self._ask(attempt, lambda: self._engine.transfer(method, payload))

    async def resume(self, attempt: str) -> None:
        """See `direct.EngineLink.resume`.

        Raises:
            NotNow: The attempt is over, or never was.
        """
        self._check(attempt)
        await self._ask(attempt, lambda: self._engine.serve(self._next))
        await self._ask(attempt, self._engine.resume)
        self.version = self._next
        self._end_attempt()
        self._changed.set()

    async def give_up(self, why: str) -> None:
        """See `direct.EngineLink.give_up`: `run` raises, also before the attempt has begun."""
        self._fail(LoadFailed(why))

    async def _follow(self) -> None:
        """Tells of versions as they come; raises what made the engine unusable."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error
            if self._told == self.version or self.version is None:
                continue
            version = self.version
            if self._on_version is not None:
                told = asyncio.ensure_future(self._on_version(version))
                failed = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait([told, failed], return_when=asyncio.FIRST_COMPLETED)
                    if self._error is not None:
                        raise self._error
                    await told
                finally:
                    told.cancel()
                    failed.cancel()
            self._told = version

    async def _ask(self, attempt: str, call: Callable[[], Awaitable[None]]) -> None:
        """Has the engine do something; the attempt may have ended meanwhile."""
        try:
            await call()
        except Exception as error:
            self._fail(error)
            raise
        self._check(attempt)

    def _check(self, attempt: str) -> None:
        if self._attempt != attempt:
            raise NotNow("this attempt to bring weights is over")

    def _note(self, method: str, payload: dict[str, Any] | None) -> None:
        """Refuses tensors of another model before vLLM loads them, or takes too few for all."""
        if method == START:
            self._came = set()
        elif method == UPDATE:
            for name, shape in announced(payload).items():
                wanted = self._expected.get(name, "no such tensor")
                if shape != wanted:
                    raise IncompatibleWeights(
                        f"tensor {name!r} of version {self._next} is {shape}; the engine expects "
                        f"{wanted}"
                    )
                self._came.add(name)
        elif method == FINISH and (missing := sorted(self._expected.keys() - self._came)):
            raise IncompatibleWeights(
                f"version {self._next} lacks {len(missing)} tensors that the engine needs "
                f"({', '.join(missing[:3])})"
            )

    def _late(self) -> None:
        self._fail(
            DeadlineExceeded(f"version {self._next} was not whole within {self._timeout:g} s")
        )

    def _fail(self, error: Exception) -> None:
        """The engine is not to be used any more; `run` says why, if it was not said before."""
        if self._error is None and not self._closed:
            self._error = error
        self._end_attempt()
        self._changed.set()

    def _end_attempt(self) -> None:
        self._attempt = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
