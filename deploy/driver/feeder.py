"""Issues prompts as the broker asks for them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from actors.sources.protocol import PromptSource
from deploy.config.deploy_config import STALL_FACTOR
from deploy.errors import RunFailed
from queues.errors import QueueClosed
from queues.protocols import PromptFeed
from queues.records import Prompt
from queues.runtime.daemon_thread import run_in_daemon_thread

T = TypeVar("T")

WANTED_SECONDS = 10.0
"""Timeout of one long poll of the broker for wanted prompts."""


class Feeder:
    """Draws prompts from a source, which may be the user's and block, and issues them.

    The source, whose `name` errors have, may take `deadline` seconds for one answer. The broker
    keeps its cursor.
    """

    def __init__(
        self, broker: PromptFeed, source: PromptSource, *, name: str, deadline: float
    ) -> None:
        self._broker, self._source = broker, source
        self._name, self._deadline = name, deadline

    async def run(self) -> None:
        """Issue prompts until the broker's queue is closed, from the stored cursor if there is one.

        Raises:
            RunFailed: The source did not answer before the deadline.
        """
        if (cursor := await self._broker.cursor()) is not None:
            await self._ask(partial(self._source.restore, cursor))
        while True:
            try:
                wanted = await self._broker.prompts_wanted(timeout=WANTED_SECONDS)
            except QueueClosed:
                return
            if wanted:
                prompts, after = await self._ask(partial(self._draw, wanted))
                await self._broker.issue(prompts, cursor=after)

    def _draw(self, count: int) -> tuple[list[Prompt], str]:
        return self._source.next(count), self._source.cursor()

    async def _ask(self, question: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self._deadline):
                return await run_in_daemon_thread(question)
        except TimeoutError:
            raise RunFailed(
                f"prompts.source = {self._name!r} did not answer within {self._deadline:g} s, "
                f"{STALL_FACTOR} times deploy.watchdog_seconds"
            ) from None
