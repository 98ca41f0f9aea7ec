"""Roles of a run on different nodes of a cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.deepspeed,
    pytest.mark.timeout(600),
]


def on_three_nodes(headway, name, *settings):
    command = headway.arguments("run", f"name={name}", *settings)
    program = Path(__file__).parents[1] / "three_nodes.py"
    done = subprocess.run(
        [sys.executable, program, *command],
        cwd=headway.folder,
        env=headway.environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_role_works_on_the_nodes_that_it_is_placed_on(headway):
    found = on_three_nodes(
        headway,
        "placed",
        "weight_sync.transport=object_store",
        'deploy.placement.learner={labels={pool="learn"}}',
        'deploy.placement.actors={labels={pool="generate"}}',
    )
    assert found["code"] == 0, found["said"]
    places = found["places"]
    assert (places["RankActor"], places["RolloutActor"]) == ("learn", "generate")
    assert places["BrokerActor"] == "head"
    assert found["groups"] == [["REMOVED", "generate", "learn"]]
    summary = json.loads((headway.folder / "runs" / "placed" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["weight_sync"]["failed"] == 0


def test_what_three_nodes_lack_is_named_and_nothing_starts(headway):
    found = on_three_nodes(
        headway,
        "lacking-labels",
        "weight_sync.transport=object_store",
        'deploy.placement.actors={labels={pool="nowhere"}}',
    )
    assert found["code"] == 2
    assert "on nodes labelled pool=nowhere; no node is" in found["said"]
    assert "pool=generate" in found["said"]
    assert found["places"] == {}
