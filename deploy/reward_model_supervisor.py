"""Looks after the process of the reward models: Ray makes it again when it dies, up to a budget.

    start ─▶ live ─▶ died ─▶ wait ─▶ start ─▶ …          until the run is over

Rollouts that end meanwhile wait for their score as long as a reward may take. What would only
happen again ends the run: models that cannot be loaded, a process that keeps dying.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError
from rich.markup import escape

from actors.ray_reward_model import RewardModelClient, create_reward_model
from deploy.config import DeployConfig, RunConfig
from deploy.errors import RunFailed
from deploy.progress import Screen
from deploy.run_directory import RunDirectory
from deploy.summary import REWARD_MODEL, Record
from deploy.supervisor import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, SETTLED_SECONDS
from deploy.tasks import first_line


def supervised_reward_models(
    paths: Sequence[str],
    config: RunConfig,
    *,
    record: Record,
    directory: RunDirectory,
    screen: Screen,
    **options: Any,
) -> "list[RewardModelSupervisor]":
    """Starts the process of the reward models of a run, where it has some: one, or none.

    Args:
        paths: Of the models; none where no reward asks them.
        config: The recipe.
        record: See `RewardModelSupervisor`.
        directory: See there.
        screen: See there.
        **options: Ray actor options.
    """
    if not paths:
        return []
    client = create_reward_model(
        paths,
        config.actors.reward_model,
        timeout=config.actors.reward_timeout_seconds,
        **options,
    )
    return [
        RewardModelSupervisor(
            client, config=config.deploy, record=record, directory=directory, screen=screen
        )
    ]


class RewardModelSupervisor:
    """The reward models' process over all its lives.

    Args:
        client: Of the process, which Ray makes again when it dies.
        config: Section `[deploy]`: start_timeout_seconds and max_restarts.
        record: Counts the restarts.
        directory: Gets a line in `restarts.jsonl` for each.
        screen: Says them.
    """

    name = REWARD_MODEL

    def __init__(
        self,
        client: RewardModelClient,
        *,
        config: DeployConfig,
        record: Record,
        directory: RunDirectory,
        screen: Screen,
    ) -> None:
        self.client = client
        self._config, self._record = config, record
        self._directory, self._screen = directory, screen

    async def start(self) -> None:
        """Loads the models for the first time; the caller sets the deadline.

        Raises:
            RayError: The process died, or what `RewardModelActor.start` raised.
        """
        await self.client.start()

    async def run(self) -> None:
        """Counts deaths until it is cancelled; to be called after `start`.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts, or took too long to
                come back.
            RayError: The models cannot be loaded any more.
        """
        in_a_row = 0
        while True:
            began = time.monotonic()
            reason = await self._live(again=in_a_row > 0)
            in_a_row = 0 if time.monotonic() - began >= SETTLED_SECONDS else in_a_row
            if in_a_row >= self._config.max_restarts:
                raise RunFailed(
                    f"{self.name} died {in_a_row + 1} times in a row, more than "
                    f"deploy.max_restarts = {self._config.max_restarts} makes up for; the last "
                    f"error: {reason}"
                )
            wait = min(FIRST_WAIT_SECONDS * 2**in_a_row, LONGEST_WAIT_SECONDS)
            in_a_row += 1
            self._note(reason, in_a_row)
            await asyncio.sleep(wait)

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
        except TimeoutError:
            raise RunFailed(
                f"{self.name} did not come back within deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        self._screen.say(f"{self.name} is ready again")

    def _note(self, reason: str, in_a_row: int) -> None:
        self._record.reward_model_restarts += 1
        self._screen.say(
            f"{self.name} is made again ({in_a_row} of {self._config.max_restarts} in a row): "
            f"{escape(reason)}"
        )
        row = {"actor": self.name, "at": time.time(), "in_a_row": in_a_row, "reason": reason}
        self._directory.append("restarts.jsonl", [row])
