"""Supervises a process that holds no part of the policy: broker, broadcaster, reward models.

Calls from elsewhere wait while it is made again, as long as their own deadlines allow.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Protocol

from ray.exceptions import RayError, RayTaskError

from deploy.driver.run_context import RunContext
from deploy.driver.supervisor import TIMING, Silent, Supervisor, Timing
from deploy.errors import RunFailed
from deploy.runtime.restart_budget import SETTLED_SECONDS
from headway.errors import first_line
from headway.roles import ProcessName, Role
from queues.errors import BrokerLostError
from weight_sync.errors import BroadcasterDied


class Service(Protocol):
    """Client of such a process, as a `RayService` is."""

    role: ClassVar[Role]
    handle: Any
    """Its handle in Ray; None while there is no process."""

    async def start(self, *, again: bool = False) -> None:
        """Wait until the process can work, for the first time or `again`, after a restart."""

    async def live(self) -> None:
        """Wait until the process dies, and raise RayError for it."""

    async def ping(self) -> None:
        """Wait for an answer that a process which does not hang gives at once."""

    def stop(self, *, again: bool = False) -> None:
        """End the process for good, or to be started `again`."""


class ServiceSupervisor(Supervisor):
    """A service through all of its restarts.

    Args:
        context: The run.
        client: Client of the process.
        on_restart: Awaited whenever the process works again.
        serve: Has it serve metrics, and returns host:port; None serves none.
        timing: The clock of the restarts, and deadlines.
    """

    def __init__(
        self,
        context: RunContext,
        client: Service,
        *,
        on_restart: Callable[[], Awaitable[None]] | None = None,
        serve: Callable[[], Awaitable[str]] | None = None,
        timing: Timing = TIMING,
    ) -> None:
        super().__init__(context, ProcessName(client.role), timing)
        self.client, self._on_restart, self._serve = client, on_restart, serve

    @property
    def handles(self) -> Mapping[ProcessName, Any]:
        """Handle in Ray of the present process; none while there is no process."""
        return {} if self.client.handle is None else {self.name: self.client.handle}

    def stop(self) -> None:
        """End the process for good."""
        self.client.stop()

    async def _start(self, *, again: bool) -> None:
        await self.client.start(again=again)
        if self._serve is not None:
            self.metrics = {self.name: await self._serve()}
        if again and self._on_restart is not None:
            await self._on_restart()

    async def _work(self) -> None:
        await self._heard(self.client.live(), self._timing.silent_seconds)

    async def _ping(self) -> None:
        await self.client.ping()

    def _kill(self) -> None:
        self.client.stop(again=True)

    async def _clear_away(self, error: Exception | None = None) -> bool:
        if not isinstance(error, RayError):  # it may hang
            self._kill()
        return True

    def _is_settled(self, worked: float) -> bool:
        return worked >= SETTLED_SECONDS or self._context.record.version > self._trained

    def _reason(self, error: Exception) -> str | None:
        if isinstance(error, RayTaskError):
            return None
        if isinstance(error, RayError | BroadcasterDied | BrokerLostError):
            return f"its process died: {first_line(error)}"
        if isinstance(error, Silent | RunFailed):
            return first_line(error)
        return "it did not start in time" if isinstance(error, TimeoutError) else None
