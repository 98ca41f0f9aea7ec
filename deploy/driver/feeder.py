"""Issues prompts as the broker asks for them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from actors.sources.fingerprints import go_on
from actors.sources.protocol import RestartableSource
from deploy.config.deploy_config import STALL_FACTOR
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from headway.daemon_thread import run_in_daemon_thread
from queues.errors import QueueClosed
from queues.protocols import PromptFeed
from queues.records import Prompt

T = TypeVar("T")

WANTED_SECONDS = 10.0
"""Timeout of one long poll of the broker for wanted prompts."""


async def feed(broker: PromptFeed, source: RestartableSource, config: RunConfig) -> None:
    """Issue prompts of a source, from the stored cursor on, until the broker's queue is closed.

    The source may be the user's and block. The broker keeps its cursor. Raises RunFailed, with
    the source's name, if no answer comes within the time in which a run may stall.
    """
    prompts, deadline = config.prompts, config.deploy.stall_seconds

    async def ask(question: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(deadline):
                return await run_in_daemon_thread(question)
        except TimeoutError:
            raise RunFailed(
                f"prompts.source = {prompts.source!r} did not answer within {deadline:g} s, "
                f"{STALL_FACTOR} times deploy.watchdog_seconds"
            ) from None

    def draw(count: int) -> tuple[list[Prompt], str]:
        return source.next(count), source.cursor()

    if (cursor := await broker.cursor()) is not None:
        await ask(partial(go_on, source, cursor, on_change=prompts.on_change))
    while True:
        try:
            wanted = await broker.prompts_wanted(timeout=WANTED_SECONDS)
        except QueueClosed:
            return
        if wanted:
            drawn, after = await ask(partial(draw, wanted))
            await broker.issue(drawn, cursor=after)
