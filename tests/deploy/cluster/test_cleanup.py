"""Cleanup ends workers with their children and removes their shared memory."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.cluster.cleanup import SHARED_MEMORY, end_leftovers, private_folder, private_folder_of
from deploy.cluster.worker_logs import end_killed_session
from deploy.runtime.session_process import MARK
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory

# A worker in Ray's clothes, whose child holds named shared memory as vLLM's processes do.
CHILD = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
time.sleep(600)
"""
WORKER = f"""
import subprocess
subprocess.Popen([{sys.executable!r}, "-c", {CHILD!r}]).wait()
"""
DRIVER = f"""
import json, subprocess, sys
import psutil
from deploy.cluster.cleanup import ending_workers
worker = subprocess.Popen(
    ["ray::Worker", "-c", {WORKER!r}], executable=sys.executable, stdout=subprocess.PIPE, text=True
)
agent = subprocess.Popen(["ray::DashboardAgent", "-c", "input()"], executable=sys.executable,
                         stdin=subprocess.PIPE)
name = worker.stdout.readline().strip()
family = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
is_tracker = lambda process: "multiprocessing.resource_tracker" in str(process.cmdline())
with ending_workers():
    halted = [process.status() for process in family if not is_tracker(process)]
worker.wait(10)
alive = [p.pid for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
print(json.dumps({{"name": name, "halted": halted, "alive": alive, "agent": agent.poll()}}))
agent.kill()
"""
# Orphans are adopted and reaped, and children that are waited for keep their exit codes.
ORPHANS = """
import subprocess
import psutil
from deploy.cluster.cleanup import reaping_orphans
from tests.waiting import until

def zombies():
    return [c for c in psutil.Process().children() if c.status() == psutil.STATUS_ZOMBIE]

def orphan(seconds):
    subprocess.run(["sh", "-c", f"sleep {seconds} & exit"], check=True)

with reaping_orphans(interval=0.05):
    own = subprocess.Popen(["sh", "-c", "exit 7"])
    assert own.wait() == 7
    orphan(0.1)
    until(lambda: psutil.Process().children())
    until(lambda: not psutil.Process().children())
with reaping_orphans(interval=3600):
    orphan(0)
    until(zombies)
assert zombies() == []
"""


def test_workers_are_halted_then_killed_with_their_children_and_named_memory_but_agents_are_not():
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=60, check=True
    )
    seen = json.loads(ran.stdout)
    assert seen["name"].startswith("psm_")
    assert len(seen["halted"]) >= 2
    assert set(seen["halted"]) == {"stopped"}
    assert seen["alive"] == []
    assert seen["agent"] is None
    assert not (Path("/dev/shm") / seen["name"]).exists()


@pytest.fixture
def session(monkeypatch):
    """Provide a session folder as Ray makes it, whose path is short enough for a socket."""
    base = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    with private_folder() as folder:
        session = folder / "ray" / "session_1"
        for name in ("sockets", "logs"):
            (session / name).mkdir(parents=True)
        yield session
    assert list(base.iterdir()) == []
    base.rmdir()


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_that_is_too_long_for_the_sockets_of_ray_is_not_taken(
    tmp_path, monkeypatch, variable
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # looked up anew
    with private_folder() as folder:
        assert folder.parent == Path("/tmp")
        longest = "ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store"
        (folder / longest).parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as raylet:
            raylet.bind(str(folder / longest))


def listening(session):
    raylet = socket.socket(socket.AF_UNIX)
    raylet.bind(str(session / "sockets" / "raylet"))
    raylet.listen()
    return raylet


def test_only_this_user_may_enter_the_folder_of_ray(session):
    assert stat.S_IMODE(session.parent.parent.stat().st_mode) == 0o700


def test_the_folder_of_a_session_that_lives_or_is_not_ours_stays(session):
    assert private_folder_of(session) is None  # it has no raylet yet
    with listening(session):
        assert private_folder_of(session) is None
    assert private_folder_of(session) == session.parent.parent
    elsewhere = session.parent.parent / "thesis" / "ray" / "session_1"
    elsewhere.parent.mkdir(parents=True)
    assert private_folder_of(session.rename(elsewhere)) is None


def test_the_output_of_a_killed_session_is_collected_when_the_run_goes_on(session, tmp_path):
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    append_rows(directory.path / "sessions.jsonl", [{"ray_logs": str(session / "logs")}])
    output = session / "logs" / f"worker-{'0' * 56}-01000000-7.out"
    output.write_text(":actor_name:actor-0\nserves\n")
    with listening(session):
        end_killed_session(directory)
        assert session.exists()
    end_killed_session(directory)
    assert not session.parent.parent.exists()
    assert "serves" in (directory.logs / "actor-0.out").read_text()
    end_killed_session(directory)


def test_what_a_killed_session_left_is_ended_with_its_named_memory_and_nothing_else(tmp_path):
    def start(run):
        environment = {**os.environ, MARK: str(run)}
        command = [sys.executable, "-c", CHILD]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        return process, SHARED_MEMORY / process.stdout.readline().strip()

    left, memory = start(tmp_path)
    other, others_memory = start(tmp_path / "other")
    try:
        end_leftovers(tmp_path)
        assert left.wait(10) == -signal.SIGKILL
        assert not memory.exists()
        assert other.poll() is None
        assert others_memory.exists()
    finally:
        end_leftovers(tmp_path / "other")
        for process in (left, other):
            process.wait(10)
            process.stdout.close()
    assert not others_memory.exists()


def test_an_orphan_is_reaped_while_the_block_runs_and_at_its_end():
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
