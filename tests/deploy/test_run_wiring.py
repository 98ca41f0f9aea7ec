"""Decisions of a run's wiring, without its processes."""

import asyncio
from types import SimpleNamespace

import pytest

from deploy.run import Run

NODES = {"broker": "here", "learner-0": "there", "actor-0": "here", "actor-1": "there"}


@pytest.mark.parametrize(
    ("host", "left_out"), [("127.0.0.1", ["learner", "actor-1"]), ("0.0.0.0", [])]
)
def test_at_the_loopback_processes_of_other_nodes_are_left_out(host, left_out):
    run = object.__new__(Run)
    run.node, run.judges = "here", []
    run.config = SimpleNamespace(deploy=SimpleNamespace(metrics_host=host))
    run.shown = [("broker", "x:1"), ("learner", "x:2")]
    run.actors = [SimpleNamespace(name=f"actor-{i}", metrics=f"x:{i}") for i in (0, 1, 2)]
    run.watchdog = SimpleNamespace(node_of=NODES.get)
    assert run.out_of_reach() == left_out


def test_a_run_that_ends_while_it_starts_saves_nothing():
    run = object.__new__(Run)
    run.learning = None
    asyncio.run(run.save())
