"""Decisions of a run's wiring, without its processes."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from deploy.errors import RunFailed
from deploy.run import Run
from deploy.driver.scrape_targets import Targets
from queues.errors import QueueClosed

NODES = {"broker": "here", "learner-0": "there", "actor-0": "here", "actor-1": "there"}


@pytest.mark.parametrize(
    ("host", "left_out"), [("127.0.0.1", ["learner", "actor-1"]), ("0.0.0.0", [])]
)
def test_at_the_loopback_processes_of_other_nodes_are_left_out(host, left_out):
    actors = [SimpleNamespace(name=f"actor-{i}", metrics=f"x:{i}") for i in (0, 1, 2)]
    targets = object.__new__(Targets)
    targets._processes = SimpleNamespace(node="here", judges=[], actors=actors)
    targets._config = SimpleNamespace(deploy=SimpleNamespace(metrics_host=host))
    targets._shown = [("broker", "x:1"), ("learner", "x:2")]
    targets._node_of = NODES.get
    reached = [name for name, _ in targets.reached()]
    every = ["broker", "learner", "actor-0", "actor-1", "actor-2"]
    assert reached == [name for name in every if name not in left_out]
    assert [name in (targets.missing() or "") for name in left_out] == [True] * len(left_out)


def test_a_run_that_ends_while_it_starts_saves_nothing():
    run = object.__new__(Run)
    run.learning, asked = None, []
    run.learner = SimpleNamespace(stop=lambda: asked.append("learner"))
    asyncio.run(run.save())
    assert asked == []


class Source:
    """Counts, and answers `slow` only once it is told to."""

    def __init__(self, slow, asked):
        self.slow, self.asked, self.told, self.place = slow, asked, threading.Event(), 0

    def answer(self, method):
        if method == self.slow:
            self.asked()
            assert self.told.wait(5)

    def next(self, count):
        self.answer("next")
        self.place += count
        return list(range(self.place - count, self.place))

    def cursor(self):
        return str(self.place)

    def restore(self, cursor):
        self.answer("restore")
        self.place = int(cursor)


class Line:
    """A broker that wants some prompts, then some more, and then none."""

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


def fed(source, *, seconds):
    run = object.__new__(Run)
    run.broker, run.inputs = Line(), SimpleNamespace(source=source, evaluations=[])
    run.config = SimpleNamespace(
        heldout=None,
        actors=SimpleNamespace(count=1),
        prompts=SimpleNamespace(source="mine:Source"),
        deploy=SimpleNamespace(stall_seconds=seconds),
    )
    return run


@pytest.mark.parametrize("slow", ["next", "restore"])
def test_a_source_that_blocks_holds_up_the_feeder_alone(slow):
    async def scenario():
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        run = fed(Source(slow, lambda: loop.call_soon_threadsafe(asked.set)), seconds=30.0)
        feeding = asyncio.create_task(run.feed())
        await asked.wait()
        assert run.broker.issued == []
        run.inputs.source.told.set()
        await feeding
        return run.broker.issued

    assert asyncio.run(scenario()) == [([7, 8], "9"), ([9, 10, 11], "12")]


@pytest.mark.parametrize("slow", ["next", "restore"])
def test_a_source_that_never_answers_ends_the_run_by_name(slow):
    run = fed(Source(slow, lambda: None), seconds=0.05)
    said = "prompts.source = 'mine:Source' did not answer within deploy.stall_seconds = 0.05"
    with pytest.raises(RunFailed, match=f"^{said}$"):
        asyncio.run(run.feed())
    run.inputs.source.told.set()
    assert run.broker.issued == []
