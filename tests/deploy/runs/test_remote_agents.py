"""A run whose agents are elsewhere: they outlive its actor and the relay, and go on."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actors.remote.task_keys import VARIABLE, TaskKeys
from tests.actors.gateway.agent_model import agent_model
from tests.deploy.conftest import HEADWAY, read_rows
from tests.deploy.running import ACTOR, Running

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.vllm]
SECRET = "a secret of more than sixteen characters"
STEPS = 8
AGENTS = Path(__file__).parents[1] / "remote_agents.py"
RECIPE = """
name = "remote"
steps = {steps}
model = {{ path = "model" }}
[prompts]
source = "files"
source_options = {{ path = "prompts.jsonl" }}
groups_per_batch = 2
group_size = 2
[actors]
environment = "remote"
environment_options = {{ relay = "http://127.0.0.1:{port}", silent_seconds = 60 }}
reward = []
max_new_tokens = 40
max_concurrent_rollouts = 8
dtype = "float32"
cores = ["0"]
kv_cache_gib = 1
[queues]
max_staleness = 2
[learner]
learning_rate = 1e-4
microbatch_tokens = 512
"""


@pytest.fixture
def port(tmp_path_factory, headway):
    """Return the port of the relay; recipe, model and prompts are written."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = headway.folder
    agent_model(folder / "model")
    lines = [f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(64)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "remote.toml").write_text(RECIPE.format(steps=STEPS, port=port))
    headway.environment[VARIABLE] = SECRET
    yield port
    del headway.environment[VARIABLE]


def serve(headway):
    """Start the relay; return it once it serves."""
    relay = headway.start_plain("serve-tasks", "remote.toml")
    assert "key of agents: " in relay.stdout.readline()
    return relay


def test_agents_elsewhere_outlive_actor_and_relay_and_every_rollout_has_the_reward_they_report(
    headway, port
):
    folder, relay = headway.folder, serve(headway)
    key = TaskKeys(SECRET.encode()).of_agents
    command = [sys.executable, AGENTS, f"http://127.0.0.1:{port}", key, folder, "4"]
    hold = folder / "hold"
    hold.touch()
    agents = subprocess.Popen(command)
    run = Running(headway, "remote")
    run.arguments = [HEADWAY, "run", "remote.toml"]
    try:
        with run:
            run.until(lambda: len([*folder.glob("held-*")]) == 4)
            [actor] = run.titled(ACTOR)
            actor.kill()
            killed = run.until(lambda: run.rows("restarts.jsonl"))[0]["at"]
            hold.unlink()  # their requests wait for the next actor
            run.trains(3)
            relay.kill()
            relay.communicate()
            relay = serve(headway)
            assert run.process.wait(300) == 0, run.output()
    finally:
        agents.kill()
        agents.wait()
        relay.kill()
        relay.communicate()
    rows = [row for row in headway.rollouts("remote") if row["state"] == "trained"]
    assert len(rows) == STEPS * 4
    turns = [row["turns"] for row in rows]
    # An answer with a control token in its middle is not known again by another actor, and one that
    # was on its way through the relay is sampled twice.
    assert turns.count(4) >= len(rows) - 8
    assert max(turns) <= 5
    played = read_rows(folder / "agents.jsonl")
    assert [row["error"] for row in played if "error" in row] == []
    assert {row["status"] for row in played} == {200}
    outlived = [row for row in played if row["times"][0] < killed < row["times"][-1]]
    assert len(outlived) == 4
    assert len(played) <= len(rows) + 8  # no conversation was begun anew
    rewards = {(row["prompt_id"], round(row["reward"], 6)) for row in played}
    assert {(row["prompt_id"], round(row["reward"], 6)) for row in rows} <= rewards
    assert run.query("SELECT count(*) FROM groups WHERE state = 'failed'") == [(0,)]
