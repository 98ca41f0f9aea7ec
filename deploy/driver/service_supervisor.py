"""Keeps a process alive that is made again when it dies, up to a limit.

These are the broker, the broadcaster and the reward models. Calls from elsewhere wait meanwhile, as
long as their own deadlines allow. A process that does not answer is ended. What cannot be started
again ends the run, and so does a process that keeps dying.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from deploy.driver.restart_policy import Clock, Restarts
from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from headway.errors import first_line
from headway.hang_detection import SILENT_SECONDS, until_silent
from queues.errors import BrokerLostError
from weight_sync.errors import BroadcasterDied


class Service(Protocol):
    """A client of such a process."""

    handle: Any
    """Its handle in Ray; None while there is no process."""

    async def start(self, *, again: bool = False) -> None:
        """Wait until the process can work, for the first time or `again`, after a restart."""

    async def live(self) -> None:
        """Wait until the process dies, and raise RayError or the client's own error for it."""

    async def ping(self) -> None:
        """Wait for an answer that a process which does not hang gives at once."""

    def stop(self, *, again: bool = False) -> None:
        """End the process for good, or to be started `again`."""


class ServiceSupervisor:
    """One process through all of its restarts.

    Args:
        context: The run.
        name: Name of the process.
        client: Client of the process.
        on_restart: Awaited whenever the process works again.
        serve: Has it serve metrics, and returns host:port; None serves none.
        clock: Clock of the restarts.
    """

    def __init__(
        self,
        context: RunContext,
        name: str,
        client: Service,
        *,
        on_restart: Callable[[], Awaitable[None]] | None = None,
        serve: Callable[[], Awaitable[str]] | None = None,
        clock: Clock = Clock(),  # noqa: B008  (frozen)
    ) -> None:
        self.name, self.client, self._serve, self._clock = name, client, serve, clock
        self._context = context
        self.metrics: str | None = None
        """Address of its metrics, as host:port; None while there is none."""
        self._on_restart = on_restart
        self._wanted, self._works = asyncio.Event(), asyncio.Event()
        self._restarts = Restarts(context, name, clock)

    @property
    def starts(self) -> bool:
        """True until the process works, for the first time or again."""
        return not self._works.is_set()

    async def start(self) -> None:
        """Have `run` start the process for the first time; the caller sets the deadline."""
        self._wanted.set()
        await self._works.wait()

    async def run(self) -> None:
        """Keep the process at work from `start` on, until cancelled: restart it whenever it dies.

        Raises:
            RunFailed: It died, or started too slowly, more often in a row than deploy.max_restarts.
            RayTaskError: It raised something that a new process would raise too.
        """
        await self._wanted.wait()
        again, version = False, self._context.record.version
        while True:
            began: float | None = None
            silent = 0.0
            try:
                if again:
                    await self._restarts.await_start(self._start(again=True))
                    if self._on_restart is not None:
                        await self._on_restart()
                else:
                    await self._start()
                self._works.set()
                began = self._clock.monotonic()
                await self._live()
            except RayTaskError:
                raise
            except (RayError, BroadcasterDied, BrokerLostError) as error:
                reason = f"its process died: {first_line(error)}"
                if began is None and not isinstance(error, RayError):
                    self.client.stop(again=True)  # it may hang
            except (TimeoutError, RunFailed):
                self.client.stop(again=True)
                reason = "it did not start in time"
                if began is not None:
                    silent = SILENT_SECONDS
                    reason = f"it did not answer within {silent:g} s"
            else:
                raise RunFailed(f"{self.name} ended without a reason")
            self._works.clear()
            worked = 0.0 if began is None else self._clock.monotonic() - began
            before, version = version, self._context.record.version
            trained = version > before
            await self._restarts.allow(reason, worked=worked, progressed=trained, silent=silent)
            again = True

    async def _start(self, *, again: bool = False) -> None:
        await self.client.start(again=again)
        if self._serve is not None:
            self.metrics = await self._serve()

    async def _live(self) -> None:
        """Wait until the process dies: raise its client's error, or TimeoutError if it hangs."""
        lost = asyncio.ensure_future(self.client.live())
        hangs = asyncio.ensure_future(until_silent(self.client.ping))
        try:
            await asyncio.wait({lost, hangs}, return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                hangs.result()
                raise TimeoutError
            lost.result()
        finally:
            lost.cancel()
            hangs.cancel()

    def stop(self) -> None:
        """End the process for good."""
        self.client.stop()
