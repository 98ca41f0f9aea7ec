"""The addresses of a run's metrics, on one node and on several."""

from types import SimpleNamespace

import pytest

from deploy.driver.scrape_targets import ScrapeTargets
from headway.metrics import MetricsAccess

NODES = {"broker": "driver", "learner-0": "other", "actor-0": "driver", "actor-1": "other"}


@pytest.mark.parametrize(
    ("host", "unreachable"), [("127.0.0.1", ["learner", "actor-1"]), ("0.0.0.0", [])]
)
def test_on_loopback_processes_of_other_nodes_are_unreachable(host, unreachable):
    actors = [SimpleNamespace(name=f"actor-{i}", metrics=f"x:{i}") for i in (0, 1, 2)]
    processes = SimpleNamespace(
        node="driver",
        services=[
            SimpleNamespace(name="broker", metrics="x:b"),
            SimpleNamespace(name="reward-model", metrics=None),
        ],
        actors=actors,
        learner=SimpleNamespace(metrics={"learner": "y:1"}),
    )
    targets = ScrapeTargets(processes, MetricsAccess(host), NODES.get)
    names = ["learner", "broker", "actor-0", "actor-1", "actor-2"]
    assert [name for name, _ in targets.reachable()] == [n for n in names if n not in unreachable]
    assert all(name in (targets.warning() or "") for name in unreachable)
    assert (targets.warning() is None) == (not unreachable)
