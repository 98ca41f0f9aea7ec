"""What processes are doing right now: their state and the stacks of their threads, children too.

Asked of a process that may hang, be stopped, or be on another node; `py-spy` reads its memory
without its help.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

DUMP_SECONDS = 5.0
"""Deadline of one process' stacks."""
CHILDREN = 4
"""Of a process that are looked at too, such as an engine's."""
NODE_SECONDS = 45.0
"""Deadline of another node's answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is."""

    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Found:
    """A process and its children."""

    states: str
    """As "pid 7 is stopped, its child 9 (VLLM::EngineCore) is sleeping"."""
    stacks: str


def place_of_actor(_: object) -> Place:
    """Where a Ray actor is; to be called in it, by `__ray_call__`."""
    return Place(ray.get_runtime_context().get_node_id(), psutil.Process().pid)


def is_placed(handle: Any) -> bool:
    """Whether Ray has found room for an actor and made its process."""
    known = ray._private.state.actors(handle._actor_id.hex())
    return bool(known.get("State") == "ALIVE")


def look(place: Place) -> Found:
    """State and stacks of a process on any node of the cluster that this one is connected to."""
    if place.node_id == ray.get_runtime_context().get_node_id():
        return look_here(place.pid)
    strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    asked = ray.remote(look_here).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        found: Found = ray.get(asked.remote(place.pid), timeout=NODE_SECONDS)
    except (RayError, TimeoutError) as error:
        return Found(f"pid {place.pid}: its node does not say ({type(error).__name__})", "")
    return found


def look_here(pid: int) -> Found:
    """State and stacks of a process of this machine."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)[:CHILDREN]]
    except psutil.Error:
        return Found(f"pid {pid} is gone", "")
    states, stacks = [], []
    for each in family:
        try:
            name = "" if each is process else f"its child ({each.name()}) "
            states.append(f"{name}pid {each.pid} is {each.status()}")
        except psutil.Error:
            continue
        stacks.append(_stacks(each.pid))
    return Found(", ".join(states), "\n".join(stacks))


def _stacks(pid: int) -> str:
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return f"pid {pid}: py-spy is not installed, so there are no stacks"
    try:
        said = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=DUMP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"pid {pid}: py-spy did not answer within {DUMP_SECONDS:g} s"
    return said.stdout or f"pid {pid}: py-spy sees nothing: {said.stderr.strip()}"
