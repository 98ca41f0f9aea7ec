"""A whole run whose command is killed again and again: it goes on by itself, without `resume`."""

import random
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from deploy.cluster.cleanup import TRACKER, left_folders
from tests.deploy.processes import started_for, wait_for_end
from tests.deploy.running import ACTOR, BROADCASTER, BROKER, RANK, WAIT_SECONDS, Running
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(3000)]

SERVERS = {"gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Processes of Ray's own without which a session ends."""
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


def watched_pair(folder):
    """Return a parent and the session whose end it waits for; None while none does."""
    for parent in commands(folder):
        with suppress(OSError, psutil.NoSuchProcess):
            for file in Path(f"/proc/{parent.pid}/fdinfo").iterdir():
                if watched := re.search(r"^Pid:\t(\d+)$", file.read_text(), re.MULTILINE):
                    return parent, psutil.Process(int(watched[1]))
    return None


def test_a_run_outlives_the_death_of_its_raylet(headway):
    """All of its processes but the session's die; the next session makes them again.

    A raylet that is stopped is killed (`cluster/test_ray_cluster.py`).
    """
    settings = ("steps=60", "heldout.every=60", "learner.checkpoint_every=10", SLOW)
    with Running(headway, "grounded", *settings) as run:
        run.trains(13)
        [session] = [p for p in psutil.Process(run.process.pid).children() if p.children()]
        [raylet] = [child for child in session.children() if child.name() == "raylet"]
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


def kind(process):
    """Return what a process below a command is, by its title, script or program."""
    words = process.cmdline()
    title = words[0].split()[0].split(".")[0]
    if title.startswith("ray::"):
        return title
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    is_session = {"run", "resume"} & {*words} and any("headway" in word for word in words[:3])
    if is_session:
        return "session" if process.children() else "standby"
    return (*scripts, Path(words[0]).name)[0]


def below(command):
    """Return the processes below a command by kind, the newest of each."""
    kinds = {}
    for process in command.children(recursive=True):
        with suppress(psutil.NoSuchProcess, IndexError):  # it ends, or is a zombie
            if TRACKER not in " ".join(process.cmdline()):
                kinds[kind(process)] = process
    return kinds


def test_a_run_outlives_sixty_kills_of_every_process_below_its_command(headway):
    """Every other kill waits for a batch; the others strike wherever a start stands.

    Whatever is in the tree of processes is struck, what was struck least before others.
    """
    kills, steps, draw = 60, 300, random.Random(60)
    settings = (
        f"steps={steps}", f"heldout.every={steps}", f"deploy.max_restarts={kills}",
        "learner.checkpoint_every=10", "actors.scripted_options={tokens_per_second=15.0}",
    )  # fmt: skip
    struck = Counter()
    with Running(headway, "unkillable", *settings) as run:
        command = psutil.Process(run.process.pid)
        for number in range(kills):
            if number % 2 == 0:
                run.trains_more(1)
                run.until(lambda: RANK in below(command))  # a new session mends its rows first
            else:
                time.sleep(draw.uniform(0.0, 12.0))
            kinds = run.until(lambda: below(command))
            chosen = min(sorted(kinds), key=lambda name: (struck[name], draw.random()))
            with suppress(psutil.NoSuchProcess):
                kinds[chosen].kill()
                struck[chosen] += 1
            print(f"{number}: {chosen}", flush=True)
            if number % 2 == 0 and chosen in SERVERS:
                died = f"Ray's {chosen.removeprefix('ray::')} on this machine died"
                run.until(lambda died=died: died in str(run.rows("restarts.jsonl")[-1:]))
        run.process.wait(6 * WAIT_SECONDS)
        assert run.process.returncode == 0, run.output()
    wait_for_end(headway, seconds=60)
    assert {"session", ACTOR, BROKER, RANK, *SERVERS} <= {*struck}
    assert any(name.startswith(BROADCASTER) for name in struck)
    assert run.summary["status"] == "done"
    run.check_accounts(steps)
    assert left_folders(run.folder) == []
