"""Supervises a process that holds no part of the policy: broker, broadcaster, reward models."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError

from deploy.driver.run_context import RunContext
from deploy.driver.supervisor import TIMING, Silent, Supervisor, Timing
from deploy.errors import RunFailed
from headway.errors import first_line
from headway.metrics import MetricsAccess
from headway.ray_process import death_of
from headway.ray_service import RayService
from headway.roles import ProcessName
from queues.errors import BrokerLostError
from weight_sync.errors import BroadcasterDied


class ServiceSupervisor(Supervisor):
    """A service through all of its restarts; `on_restart` is awaited whenever it works again."""

    def __init__(
        self,
        context: RunContext,
        client: RayService,
        *,
        on_restart: Callable[[], Awaitable[None]] | None = None,
        access: MetricsAccess | None = None,
        timing: Timing = TIMING,
    ) -> None:
        super().__init__(context, ProcessName(client.role), timing)
        self.client, self._on_restart, self._access = client, on_restart, access

    @property
    def handles(self) -> Mapping[ProcessName, Any]:
        """Handle in Ray of the present process; none while there is no process."""
        return {} if self.client.handle is None else {self.name: self.client.handle}

    def stop(self) -> None:
        """End the process for good."""
        self.client.stop()

    async def _start(self, *, again: bool) -> None:
        await self.client.start(again=again)
        if self._access is not None:
            self.metrics = {self.name: await self.client.serve_metrics(self._access)}
        if again and self._on_restart is not None:
            await self._on_restart()

    async def _work(self) -> None:
        await self._heard(self.client.live(), self.client.ping, self._timing.silent_seconds)

    def _kill(self) -> None:
        self.client.stop(again=True)

    async def _clear_away(self, error: Exception | None = None) -> bool:
        if not isinstance(error, RayError):  # it may hang
            self._kill()
        return True

    def _is_settled(self, worked: float) -> bool:
        return super()._is_settled(worked) or self._context.record.version > self._trained

    def _reason(self, error: Exception) -> str | None:
        if isinstance(error, RayTaskError):
            return None
        if isinstance(error, RayError):
            return f"its process died: {death_of(error)}"
        if isinstance(error, BroadcasterDied | BrokerLostError):
            return f"its process died: {first_line(error)}"
        if isinstance(error, Silent | RunFailed):
            return first_line(error)
        return "it did not start in time" if isinstance(error, TimeoutError) else None
