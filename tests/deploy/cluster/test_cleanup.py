"""Cleanup ends workers with their children and removes their shared memory."""

import json
import subprocess
import sys
from pathlib import Path

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
