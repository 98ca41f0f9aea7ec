"""Looks after the process of the reward models: Ray makes it again when it dies, up to a budget.

    start ─▶ live ─▶ died ─▶ wait ─▶ start ─▶ …          until the run is over

Rollouts that end meanwhile wait for their score as long as a reward may take. What would only
happen again ends the run: models that cannot be loaded, a process that keeps dying.
"""

import asyncio
import time

from ray.exceptions import RayActorError

from actors.ray_reward_model import RewardModelClient
from deploy.config.run_config import DeployConfig
from deploy.driver.restart_policy import Restarts
from deploy.errors import RunFailed, first_line
from deploy.observability.exporter import show_process
from deploy.runtime.console import Screen
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_record import REWARD_MODEL, Record


class RewardModelSupervisor:
    """The reward models' process over all its lives.

    Args:
        client: Of the process, which Ray makes again when it dies.
        config: Section `[deploy]`: start_timeout_seconds and max_restarts.
        record: Counts the restarts.
        rows: Gets one of `restarts.jsonl` for each.
        screen: Says them.
        metrics_host: Address of its node to show metrics at; None: nowhere.
    """

    name = REWARD_MODEL

    def __init__(
        self,
        client: RewardModelClient,
        *,
        config: DeployConfig,
        record: Record,
        rows: JsonlWriter,
        screen: Screen,
        metrics_host: str | None = None,
    ) -> None:
        self.client, self._metrics_host = client, metrics_host
        self.metrics: str | None = None
        """Where Prometheus finds the metrics of the present life."""
        self._config, self._screen = config, screen
        self._restarts = Restarts(self.name, config=config, record=record, rows=rows, screen=screen)

    async def start(self) -> None:
        """Loads the models for the first time; the caller sets the deadline.

        Raises:
            RayError: The process died, or what `RewardModelActor.start` raised.
        """
        await self.client.start()
        await self._show()

    async def _show(self) -> None:
        if self._metrics_host is not None:
            self.metrics = await show_process(self.client.handle, self._metrics_host)

    async def run(self) -> None:
        """Counts deaths until it is cancelled; to be called after `start`.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts, or took too long to
                come back.
            RayError: The models cannot be loaded any more.
        """
        again = False
        while True:
            began = time.monotonic()
            reason = await self._live(again=again)
            await self._restarts.allow(reason, worked=time.monotonic() - began)
            again = True

    def stop(self) -> None:
        """Ends the process for good."""
        self.client.stop()

    async def _live(self, *, again: bool) -> str:
        """One life, from its loading where it is not the first; why it ended."""
        try:
            if again:
                await self._start_again()
            await self.client.live()
        except RayActorError as error:
            return f"its process died: {first_line(error)}"
        raise RunFailed(f"{self.name} ended without a reason")

    async def _start_again(self) -> None:
        seconds = self._config.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.client.start(again=True)
                await self._show()
        except TimeoutError:
            raise RunFailed(
                f"{self.name} did not come back within deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        self._screen.say(f"{self.name} is ready again")
