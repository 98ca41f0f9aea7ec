"""Keeps the process of the reward models alive: Ray restarts it when it dies, up to a limit.

Rollouts that end during a restart wait for their score as long as a reward may take. Models that
cannot be loaded end the run, and so does a process that keeps dying.
"""

from ray.exceptions import RayActorError

from actors.ray_reward_model import RewardModelClient
from deploy.driver.restart_policy import Clock, Restarts
from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed, first_line
from deploy.observability.exporter import show_process
from deploy.storage.run_record import REWARD_MODEL
from queues.runtime.prometheus import MetricsAccess


class RewardModelSupervisor:
    """The reward models' process through all of its restarts.

    It serves metrics by `access`, or none where that is None.
    """

    name = REWARD_MODEL

    def __init__(
        self,
        context: RunContext,
        client: RewardModelClient,
        *,
        access: MetricsAccess | None = None,
        clock: Clock = Clock(),  # noqa: B008  (frozen)
    ) -> None:
        self.client, self._access, self._clock = client, access, clock
        self.metrics: str | None = None
        """Address of its metrics, as host:port; None while there is none."""
        self._restarts = Restarts(context, self.name, clock)

    async def start(self, *, again: bool = False) -> None:
        """Load the models, for the first time or `again`; the caller sets the deadline.

        Raises:
            RayError: The process died, or `RewardModelActor.start` raised.
        """
        await self.client.start(again=again)
        if self._access is not None:
            self.metrics = await show_process(self.client.handle, self._access)

    async def run(self) -> None:
        """Restart the process whenever it dies, until cancelled; to be called after `start`.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts, or started too slowly.
            RayError: The models cannot be loaded any more.
        """
        again = False
        while True:
            began: float | None = None
            try:
                if again:
                    await self._restarts.await_start(self.start(again=True))
                began = self._clock.monotonic()
                await self.client.live()
            except RayActorError as error:
                reason = f"its process died: {first_line(error)}"
            else:
                raise RunFailed(f"{self.name} ended without a reason")
            worked = 0.0 if began is None else self._clock.monotonic() - began
            await self._restarts.allow(reason, worked=worked)
            again = True

    def stop(self) -> None:
        """End the process for good."""
        self.client.stop()
