"""Callers that wait for a change are woken by it."""

import asyncio
import time

from queues.broker.long_polls import LongPolls


class EarlyLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers fire after half of their time."""

    def call_later(self, delay, callback, *args, context=None):
        return super().call_later(delay / 2, callback, *args, context=context)


def test_a_caller_is_woken_at_its_moment_though_timers_fire_early():
    async def wait():
        polls = LongPolls(lambda: None)
        moment = time.monotonic() + 0.05
        polls.wake_at(moment)
        return await polls.until(lambda: moment if time.monotonic() >= moment else None, 20.0)

    with asyncio.Runner(loop_factory=EarlyLoop) as runner:
        assert runner.run(wait()) is not None
