"""The feeder: prompts from a source that may block, as the broker asks for them."""

import asyncio
import threading

import pytest

from deploy.config.deploy_config import STALL_FACTOR
from deploy.config.loader import load_recipe
from deploy.driver.feeder import feed
from deploy.errors import RunFailed
from queues.errors import QueueClosed


class Source:
    """Counts, and blocks in one method until it is released."""

    def __init__(self, blocking, on_call):
        self.blocking, self.on_call = blocking, on_call
        self.released, self.position = threading.Event(), 0

    def _answer(self, method):
        if method == self.blocking:
            self.on_call()
            assert self.released.wait(5)

    def next(self, count):
        self._answer("next")
        self.position += count
        return list(range(self.position - count, self.position))

    def cursor(self):
        return str(self.position)

    def restore(self, cursor):
        self._answer("restore")
        self.position = int(cursor)


class Broker:
    """Wants some prompts, then some more, and then none."""

    def __init__(self):
        self.wanted, self.issued = [2, 0, 3], []

    async def cursor(self):
        return "7"

    async def prompts_wanted(self, timeout):
        if not self.wanted:
            raise QueueClosed("over")
        return self.wanted.pop(0)

    async def issue(self, prompts, *, cursor):
        self.issued.append((prompts, cursor))


def feeding(broker, source, *, deadline):
    settings = ["prompts.source=mine:Source", f"deploy.watchdog_seconds={deadline / STALL_FACTOR}"]
    return feed(broker, source, load_recipe("demo", settings))


@pytest.mark.parametrize("blocking", ["next", "restore"])
def test_a_source_that_blocks_holds_up_the_feeder_alone(blocking):
    async def scenario():
        loop, called, broker = asyncio.get_running_loop(), asyncio.Event(), Broker()
        source = Source(blocking, lambda: loop.call_soon_threadsafe(called.set))
        task = asyncio.create_task(feeding(broker, source, deadline=30.0))
        await called.wait()
        assert broker.issued == []
        source.released.set()
        await task
        return broker.issued

    assert asyncio.run(scenario()) == [([7, 8], "9"), ([9, 10, 11], "12")]


@pytest.mark.parametrize("blocking", ["next", "restore"])
def test_a_source_that_never_answers_ends_the_run_by_name(blocking):
    broker, source = Broker(), Source(blocking, lambda: None)
    message = r"prompts.source = 'mine:Source' did not answer within 0.05 s, 3 times deploy"
    with pytest.raises(RunFailed, match=f"^{message}"):
        asyncio.run(feeding(broker, source, deadline=0.05))
    source.released.set()
    assert broker.issued == []
