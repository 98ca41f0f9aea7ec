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
    names = ["learner", "broker", "actor-0", "actor-1", "actor-2"]
    metrics = [{name: "x:1"} for name in names]
    supervisors = [SimpleNamespace(metrics=shown) for shown in (*metrics, {})]
    processes = SimpleNamespace(node="driver", supervisors=lambda: supervisors)
    targets = ScrapeTargets(processes, MetricsAccess(host), NODES.get)
    assert [name for name, _ in targets.reachable()] == [n for n in names if n not in unreachable]
    assert all(name in (targets.warning() or "") for name in unreachable)
    assert (targets.warning() is None) == (not unreachable)
