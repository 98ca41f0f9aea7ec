"""State and thread stacks of a process and its children, which may hang, on any node."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

DUMP_SECONDS = 5.0
"""Deadline for the stacks of one process."""
CHILDREN = 16
"""Children of a process that are dumped too, such as those of an engine and of rewards."""
NODE_SECONDS = 45.0
"""Deadline for the answer of another node."""


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """The node and the pid of a process."""

    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """State and stacks of a process and its children."""

    states: str
    """As "pid 7 is stopped, its child (VLLM::EngineCore) pid 9 is sleeping"."""
    stacks: str


def locate(_: object) -> ProcessLocation:
    """Return where this process runs; for `call_in`."""
    return ProcessLocation(ray.get_runtime_context().get_node_id(), psutil.Process().pid)


def dump(location: ProcessLocation) -> ProcessDump:
    """Dump a process on any node of the cluster that this process is connected to."""
    if location.node_id == ray.get_runtime_context().get_node_id():
        return dump_local(location.pid)
    strategy = NodeAffinitySchedulingStrategy(location.node_id, soft=False)
    remote = ray.remote(dump_local).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        answer: ProcessDump = ray.get(remote.remote(location.pid), timeout=NODE_SECONDS)
    except (RayError, TimeoutError) as error:
        state = f"pid {location.pid}: its node does not answer ({type(error).__name__})"
        return ProcessDump(state, "")
    return answer


def dump_local(pid: int) -> ProcessDump:
    """Dump a process of this machine."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)[:CHILDREN]]
    except psutil.Error:
        return ProcessDump(f"pid {pid} is gone", "")
    states, stacks = [], []
    for member in family:
        try:
            name = "" if member is process else f"its child ({member.name()}) "
            states.append(f"{name}pid {member.pid} is {member.status()}")
        except psutil.Error:
            continue
        stacks.append(_stacks(member.pid))
    return ProcessDump(", ".join(states), "\n".join(stacks))


def _stacks(pid: int) -> str:
    beside_python = Path(sys.executable).parent / "py-spy"
    program = str(beside_python) if beside_python.exists() else shutil.which("py-spy")
    if program is None:
        return f"pid {pid}: py-spy is not installed, so there are no stacks"
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DUMP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"pid {pid}: py-spy did not answer within {DUMP_SECONDS:g} s"
    except OSError as error:
        return f"pid {pid}: py-spy could not be started: {error}"
    return done.stdout or f"pid {pid}: py-spy sees nothing: {done.stderr.strip()}"
