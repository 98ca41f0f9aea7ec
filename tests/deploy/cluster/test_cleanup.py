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

from deploy.cluster.cleanup import (
    OWNER,
    SHARED_MEMORY,
    end_leftovers,
    left_folders,
    private_folder,
)
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
def folder(monkeypatch, tmp_path):
    """Provide the private folder of a session of the run in `tmp_path / "run"`, which lives."""
    base = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short enough for a socket
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    with private_folder(tmp_path / "run") as folder:
        yield folder
    assert list(base.iterdir()) == []
    base.rmdir()


def own(folder, **changes):
    """Change what a private folder says of the session that made it."""
    owner = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps(owner | changes))


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_that_is_too_long_for_the_sockets_of_ray_is_not_taken(
    tmp_path, monkeypatch, variable
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # looked up anew
    with private_folder(tmp_path / "run") as folder:
        assert folder.parent == Path("/tmp")
        longest = "ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store"
        (folder / longest).parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as raylet:
            raylet.bind(str(folder / longest))


def test_only_this_user_may_enter_the_folder_of_ray(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("changes", "is_left"),
    [
        ({}, False),
        ({"started": "17"}, True),  # another process has its number
        ({"pid": 2**22 + 1}, True),  # there is none of its number
        ({"started": "17", "run": "/elsewhere/run"}, False),
        ({"started": "17", "host": "another"}, False),
    ],
)
def test_only_the_folder_of_a_dead_session_of_the_run_on_this_machine_is_left(
    folder, tmp_path, changes, is_left
):
    own(folder, **changes)
    (folder.parent / "headway-thesis").mkdir()  # has no owner
    assert left_folders(tmp_path / "run") == [folder] * is_left
    assert left_folders(tmp_path / "other") == []
    (folder.parent / "headway-thesis").rmdir()


@pytest.mark.parametrize("while_ray_started", [False, True])
def test_what_a_killed_session_left_is_collected_and_removed_when_the_run_goes_on(
    folder, tmp_path, while_ray_started
):
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    logs = folder / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / f"worker-{'0' * 56}-01000000-7.out").write_text(":actor_name:actor-0\nserves\n")
    if not while_ray_started:
        append_rows(directory.path / "sessions.jsonl", [{"ray_logs": str(logs)}])
    end_killed_session(directory)
    assert folder.exists()
    own(folder, started="17")
    end_killed_session(directory)
    assert not folder.exists()
    assert (directory.logs / "actor-0.out").exists() != while_ray_started
    end_killed_session(directory)


# A worker of Ray's with an engine that holds a semaphore; both are killed, with their tracker.
ENGINE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(600)
"""
WORKER_OF_ENGINE = f"""
import subprocess
subprocess.Popen([{sys.executable!r}, "-c", {ENGINE!r}]).wait()
"""
HOLDER = f"""
import json, os, signal, subprocess, sys
from pathlib import Path
import psutil
from deploy.cluster.cleanup import private_folder, removing_memory
from tests.waiting import until

run, how = Path(sys.argv[1]), sys.argv[2]
worker = subprocess.Popen(
    ["ray::Worker", "-c", {WORKER_OF_ENGINE!r}], executable=sys.executable,
    stdout=subprocess.PIPE, text=True,
)
file = Path("/dev/shm/sem." + worker.stdout.readline().strip().removeprefix("/"))

def kill():
    for process in [*psutil.Process(worker.pid).children(recursive=True), worker]:
        process.kill()
    worker.wait(10)

with private_folder(run) as folder:
    noted = lambda: str(file) in (folder / "shared_memory.json").read_text()
    with removing_memory(folder, 3600 if how == "end" else 0.05):
        until(noted)
        assert file.exists()
        kill()
        if how == "meanwhile":
            until(lambda: not file.exists())
        elif how == "session":
            os.kill(os.getpid(), signal.SIGKILL)
assert not file.exists()
"""


@pytest.mark.parametrize("how", ["meanwhile", "end", "session"])
def test_semaphores_of_a_killed_engine_are_removed(monkeypatch, tmp_path, how):
    """Once all who held them are dead, at the end of the run, or by the session after a kill."""
    base = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short enough for a socket
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    ran = subprocess.run(
        [sys.executable, "-c", HOLDER, tmp_path / "run", how],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if how == "session":
        assert ran.returncode == -signal.SIGKILL
        [folder] = left_folders(tmp_path / "run")
        held = [Path(path) for _, path in json.loads((folder / "shared_memory.json").read_text())]
        (tmp_path / "run" / "logs").mkdir(parents=True)
        end_killed_session(RunDirectory(tmp_path / "run"))
        assert not folder.exists()
        assert [path for path in held if path.exists()] == []
    else:
        assert ran.returncode == 0, ran.stderr
    assert {*base.iterdir()} == set()
    base.rmdir()


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
