"""A whole run whose command is killed again and again: it goes on by itself, without `resume`."""

import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from deploy.cluster.ray_cluster import RAYLET
from tests.deploy.processes import started_for, wait_for_end
from tests.deploy.running import WAIT_SECONDS, Running
from tests.deploy.runtime.test_session_process import links
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(3000)]

KILLS, STEPS = 20, 600
SLOW = "actors.scripted_options={tokens_per_second=40.0}"


def commands(folder):
    """Return the processes of `headway run` and `headway resume`: parents and sessions."""
    processes = []
    for path in started_for(folder):
        with suppress(OSError, psutil.NoSuchProcess):  # it may end as it is looked at
            arguments = (path / "cmdline").read_bytes().split(b"\0")
            if {b"run", b"resume"} & {*arguments} and any(b"headway" in part for part in arguments):
                processes.append(psutil.Process(int(path.name)))
    return processes


def watches(process):
    """Return True if a process waits for the end of another one, as a parent does."""
    with suppress(OSError):
        return "anon_inode:[pidfd]" in {*links(Path(f"/proc/{process.pid}/fd"))}
    return False


def watched_pair(folder):
    """Return parent and session, if there are just these and the parent watches."""
    both = commands(folder)
    return both if len(both) == 2 and any(map(watches, both)) else None


def test_a_run_outlives_the_death_of_its_raylet(headway):
    """All of its processes but the session's die; the next session makes them again.

    A raylet that is stopped is killed (`cluster/test_ray_cluster.py`).
    """
    settings = ("steps=60", "heldout.every=60", "learner.checkpoint_every=10", SLOW)
    with Running(headway, "grounded", *settings) as run:
        run.trains(13)
        [session] = [p for p in psutil.Process(run.process.pid).children() if p.children()]
        [raylet] = [child for child in session.children() if child.name() == RAYLET]
        struck = time.time()
        raylet.kill()
        [restart] = run.until(lambda: run.rows("restarts.jsonl"))
        assert restart["actor"] == "driver"
        assert "Ray's raylet on this machine died" in restart["reason"]
        assert restart["at"] - struck < 60.0
        run.ends()
    assert (run.summary["status"], run.summary["version"]) == ("done", 60)
    run.check_accounts(60)
    wait_for_end(headway, seconds=60)


def test_a_run_outlives_twenty_kills_of_its_command_at_random_moments(headway):
    draw = random.Random(24)
    settings = (
        f"steps={STEPS}", f"heldout.every={STEPS}", f"deploy.max_restarts={KILLS}",
        "learner.checkpoint_every=10", SLOW,
    )  # fmt: skip
    with Running(headway, "undying", *settings) as run:
        for _ in range(KILLS):
            time.sleep(draw.uniform(0.5, 25.0))
            # A kill within the second in which the other one is replaced would be that of both.
            draw.choice(until(lambda: watched_pair(headway.folder), WAIT_SECONDS)).kill()
        until(lambda: not commands(headway.folder), 6 * WAIT_SECONDS)
    wait_for_end(headway, seconds=60)
    assert {row["actor"] for row in run.rows("restarts.jsonl")} == {"driver"}
    assert run.summary["status"] == "done"
    run.check_accounts(STEPS)
