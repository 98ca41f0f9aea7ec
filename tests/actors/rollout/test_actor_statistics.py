"""The figures of one engine over several lives."""

import os

from actors.rollout.actor_statistics import ActorStatistics, merge
from actors.rollout.agent_statistics import AgentStatistics


def life(**changes):
    return {
        "engine_id": "engine-0",
        "pid": 1,
        "metrics": None,
        "version": 3,
        "tokens_generated": 100,
        "rollouts": 10,
        "groups": {"accepted": 4, "aborted": 1},
        "agents": AgentStatistics().statistics(),
        "running_rollouts": 0,
        "mean_running_rollouts": 2.0,
        "outages": [],
        "serving_seconds": 30.0,
        "idle_seconds": {"first_weights": 5.0, "leases": 3.0},
        "idle_fraction": 0.1,
        **changes,
    }


def test_lives_add_up_and_the_moment_is_the_newest_ones():
    assert merge([life()]) == life()
    newest = life(
        pid=2,
        version=7,
        groups={"accepted": 1, "failed": 2},
        running_rollouts=6,
        mean_running_rollouts=5.0,
        serving_seconds=10.0,
        idle_seconds={"first_weights": 20.0, "leases": 1.0},
    )
    assert merge([life(), newest]) == {
        **newest,
        "tokens_generated": 200,
        "rollouts": 20,
        "groups": {"accepted": 5, "aborted": 1, "failed": 2},
        "mean_running_rollouts": (30 * 2 + 10 * 5) / 40,
        "serving_seconds": 40.0,
        "idle_seconds": {"first_weights": 25.0, "leases": 4.0},
        "idle_fraction": (4 + 20) / (40 + 20),
    }


def test_lives_that_never_served_have_no_share_of_idle_time():
    idle = {"first_weights": 5.0, "leases": 0.0}
    never = life(serving_seconds=0.0, mean_running_rollouts=None, idle_seconds=idle)
    merged = merge([never, never])
    assert (merged["idle_fraction"], merged["mean_running_rollouts"]) == (None, None)


def test_what_is_merged_is_what_a_tally_says():
    statistics = ActorStatistics("engine-0").statistics()
    assert statistics["pid"] == os.getpid()
    assert merge([statistics, statistics]).keys() == statistics.keys() == life().keys()
