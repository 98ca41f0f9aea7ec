"""Decisions of a run's wiring, without its processes."""

import asyncio
from types import SimpleNamespace

import pytest

from deploy.run import Run
from deploy.targets import Targets

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
