"""Cleanup ends workers with their children and removes their shared memory."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.cluster.cleanup import is_dead_session, remove_session
from deploy.cluster.worker_logs import end_killed_session
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
def session():
    """Provide a session folder as Ray makes it, whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    session = folder / "session_1"
    (session / "sockets").mkdir(parents=True)
    (session / "logs").mkdir()
    yield session
    shutil.rmtree(folder)


def test_a_session_goes_with_the_links_to_it_and_others_stay(session):
    other = session.with_name("session_2")
    other.mkdir()
    session.with_name("session_latest").symlink_to(session)
    session.with_name("discovery.json").symlink_to(session / "discovery.json")
    session.with_name("other.json").symlink_to(other / "discovery.json")
    remove_session(session)
    assert sorted(path.name for path in session.parent.iterdir()) == ["other.json", "session_2"]


def test_only_a_session_that_was_killed_is_a_dead_one(session):
    assert not is_dead_session(session)  # it has no raylet yet
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(session / "sockets" / "raylet"))
        raylet.listen()
        assert not is_dead_session(session)
    assert is_dead_session(session)
    renamed = session.rename(session.with_name("thesis"))
    assert not is_dead_session(renamed)


def test_the_output_of_a_killed_session_is_collected_when_the_run_goes_on(session, tmp_path):
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    directory.append("sessions.jsonl", [{"ray_logs": str(session / "logs")}])
    output = session / "logs" / f"worker-{'0' * 56}-01000000-7.out"
    output.write_text(":actor_name:actor-0\nserves\n")
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(session / "sockets" / "raylet"))
        raylet.listen()
        end_killed_session(directory)
        assert session.exists()
    end_killed_session(directory)
    assert not session.exists()
    assert "serves" in (directory.logs / "actor-0.out").read_text()
    end_killed_session(directory)
