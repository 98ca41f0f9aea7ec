"""Roles of a run on different nodes of a cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parents[1] / "three_nodes.py"


def test_each_role_works_on_the_nodes_that_it_is_placed_on(headway):
    settings = (
        "name=placed", "weight_sync.transport=object_store",
        'deploy.placement.learner={labels={pool="learn"}}',
        'deploy.placement.actors={labels={pool="generate"}}',
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, PROGRAM, *headway.arguments("run", *settings)],
        cwd=headway.folder, env=headway.environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["code"] == 0, result["said"]
    places = result["places"]
    assert (places["RankActor"], places["RolloutActor"]) == ("learn", "generate")
    assert places["BrokerActor"] == "head"
    assert result["groups"] == [["REMOVED", "generate", "learn"]]
    summary = json.loads((headway.run_folder("placed") / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["weight_sync"]["failed"] == 0
