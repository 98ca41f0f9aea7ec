"""The engine's side of transports without staging: executes the calls of the learner.

    pause(v) ─▶ transfer(…) ─▶ … ─▶ resume ─▶ on_version(v)

A failed attempt leaves a mixture of weights, so there is no second one: `run` ends with the error.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from weight_sync.errors import DeadlineExceeded, IncompatibleWeights, LoadFailed, UpdateRefused
from weight_sync.manifest import Signature
from weight_sync.progress import allowance, show
from weight_sync.receive.engine import PausableEngine
from weight_sync.vllm.transfer import FINISH, START, UPDATE, tensor_shapes

JOIN_SECONDS = 10.0
"""Interval at which an engine registers again, since a broadcaster that is restarted knows none."""
MOST_ITEM_BYTES = 4
"""Bytes of an element on the wire; bfloat16 takes half."""


class DirectEngine(PausableEngine, Protocol):
    """An engine that the learner writes weights into; any error of a method ends it."""

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        """Call a method of its weight-transfer endpoint, by vLLM's name."""

    async def serve(self, version: int) -> None:
        """Set the version of the transferred weights; tokens sampled after `resume` carry it."""


class DirectReceiver:
    """Keeps an engine, which nobody else may pause, paused while the learner writes to it.

    `join` registers the engine with the learner, at intervals. `on_version` is awaited with each
    version once the engine serves it; no other begins before. `timeout` is the longest pause in
    seconds, beside what the bytes take, in case the learner is gone.
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
        """The version that the engine serves; None until its first update (STALE)."""
        self.handled_version: int | None = None
        """The version whose `on_version` has returned."""
        self._engine = engine
        self._join = join
        self._expected = {name: shape for name, (_, shape) in expected.items()}
        self._on_version = on_version
        elements = sum(math.prod(shape) for shape in self._expected.values())
        self._timeout = allowance(timeout, MOST_ITEM_BYTES * elements)
        self._attempt: str | None = None
        """Token of the open attempt."""
        self._next = -1
        """Its version."""
        self._received: set[str] = set()
        self._error: Exception | None = None
        self._failed = asyncio.Event()
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None
        self._handling: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the engine registered, and return when `stop` is set.

        After any error, which it raises, the engine must be replaced.
        """
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._failed)]
        try:
            while not any(task.done() for task in waits):
                await self._join()
                await asyncio.wait(waits, timeout=JOIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
        finally:
            for task in (*waits, self._handling):
                if task is not None:
                    task.cancel()
            self.close()

    def close(self) -> None:
        """Refuse every later call."""
        self._closed = True
        self._end_attempt()

    async def pause(self, version: int, attempt: str) -> int | None:
        """Pause sampling and return the version served before, None if there was none.

        All later calls of the attempt must carry the unique token `attempt`. Raises UpdateRefused
        if the engine goes on as it is, and LoadFailed if another attempt is open.
        """
        refusal = None
        if self._closed or self._error is not None:
            refusal = "the engine is about to end"
        elif self._attempt is not None:
            error = LoadFailed(f"version {version} came while version {self._next} was not whole")
            self._fail(error)
            raise error
        elif self.version is not None and version <= self.version:
            refusal = f"the engine serves {self.version}"
        elif self.handled_version != self.version:
            refusal = f"version {self.version} is still in use"
        if refusal is not None:
            raise UpdateRefused(f"version {version} was refused: {refusal}")
        self._attempt, self._next = attempt, version
        late = DeadlineExceeded(f"version {version} was not whole within {show(self._timeout)} s")
        self._deadline = asyncio.get_running_loop().call_later(self._timeout, self._fail, late)
        await self._run_step(attempt, self._engine.pause)
        return self.version

    async def transfer(self, attempt: str, method: str, payload: dict[str, Any] | None) -> None:
        """Call a method of the engine's weight-transfer endpoint.

        Raises UpdateRefused if the attempt is over, and IncompatibleWeights for other tensors than
        the engine's.
        """

        async def step() -> None:
            self._check_tensors(method, payload)
            await self._engine.transfer(method, payload)

        self._check_open(attempt)
        await self._run_step(attempt, step)

    async def resume(self, attempt: str) -> None:
        """Resume sampling at the version of the attempt; UpdateRefused if the attempt is over."""
        self._check_open(attempt)
        await self._run_step(attempt, lambda: self._engine.serve(self._next))
        await self._run_step(attempt, self._engine.resume)
        self.version = self._next
        self._end_attempt()
        self._handling = asyncio.create_task(self._handle(self.version))

    async def give_up(self, reason: str) -> None:
        """End the engine, which holds a mixture or did not answer in time: `run` raises."""
        self._fail(LoadFailed(reason))

    async def _handle(self, version: int) -> None:
        try:
            if self._on_version is not None:
                await self._on_version(version)
            self.handled_version = version
        except Exception as error:  # noqa: BLE001  (raised by `run`)
            self._fail(error)

    async def _run_step(self, attempt: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run a step of the engine; the attempt may end meanwhile."""
        try:
            await step()
        except Exception as error:
            self._fail(error)
            raise
        self._check_open(attempt)

    def _check_open(self, attempt: str) -> None:
        if self._attempt != attempt:
            raise UpdateRefused("this attempt to send weights is over")

    def _check_tensors(self, method: str, payload: dict[str, Any] | None) -> None:
        """Refuse tensors of another model before vLLM loads them, and too few at the end."""
        if method == START:
            self._received = set()
        elif method == UPDATE:
            for name, shape in tensor_shapes(payload).items():
                expected = self._expected.get(name, "no such tensor")
                if shape != expected:
                    raise IncompatibleWeights(
                        f"tensor {name!r} of version {self._next} is {shape}; the engine expects "
                        f"{expected}"
                    )
                self._received.add(name)
        elif method == FINISH and (missing := sorted(self._expected.keys() - self._received)):
            raise IncompatibleWeights(
                f"version {self._next} lacks {len(missing)} tensors that the engine needs "
                f"({', '.join(missing[:3])})"
            )

    def _fail(self, error: Exception) -> None:
        """Make the engine unusable: `run` raises the first error."""
        if self._error is None and not self._closed:
            self._error = error
        self._end_attempt()
        self._failed.set()

    def _end_attempt(self) -> None:
        self._attempt = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
