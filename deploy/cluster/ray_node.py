"""A node of a Ray cluster that is drained before it ends.

SIGTERM ─▶ drain ─▶ actors hand over what they sample, and leave ─▶ the node ends
"""

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from deploy.cluster.cleanup import AGENTS
from deploy.errors import DeployError
from deploy.runtime.safe_console import echo

LEAVE_SECONDS = 15.0
"""Longest wait for actors to leave a drained node; they hand over within 8 s."""
END_SECONDS = 30.0
"""Deadline of the processes of a node to end."""
POLL_SECONDS = 0.5
IDLE = ("ray::IDLE", *AGENTS)
"""Titles of Ray's processes that work for nobody."""


def serve_node(address: str, options: Sequence[str]) -> int:
    """Join this machine to a cluster by `ray start --block`; return the exit code of that.

    An interrupt drains the node, waits for its actors to leave, ends it and returns 0; a second one
    ends it at once.

    Args:
        address: Of the cluster, HOST:PORT.
        options: Further options of `ray start`.
    """
    name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    given = [f"--address={address}", f"--node-name={name}", *options]
    # A session of its own: Ctrl-C of a terminal must not reach Ray's processes first.
    node = subprocess.Popen([*ray_start, *given], start_new_session=True)
    try:
        return node.wait()
    except KeyboardInterrupt:
        _hand_over(node.pid, address, name)
        return 0
    finally:
        _end(node)


def _hand_over(pid: int, address: str, name: str) -> None:
    """Drain a node and wait until no actor is left on it."""
    try:
        _drain(address, name)
    except Exception as error:  # noqa: BLE001  (whatever Ray's client raises: the node has to end)
        echo(f"node {name} ends without being drained: {error}")
        return
    echo(
        f"node {name} is drained; it ends when its actors have left, in {LEAVE_SECONDS:g} s at most"
    )
    deadline = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < deadline and _works(pid):
        time.sleep(POLL_SECONDS)


def _drain(address: str, name: str) -> None:
    """Tell Ray that the node of this name is to go; raise DeployError if Ray refuses."""
    client = GcsClient(address=address)
    ids = [
        node_id.hex()
        for node_id, info in client.get_all_node_info(timeout=LEAVE_SECONDS).items()
        if info.node_name == name and info.state == GcsNodeInfo.ALIVE
    ]
    if not ids:
        raise DeployError("the cluster does not have it")
    deadline = int((time.time() + LEAVE_SECONDS) * 1000)
    accepted, problem = client.drain_node(
        ids[0], DRAIN_NODE_REASON_PREEMPTION, "its machine is to go", deadline
    )
    if not accepted:
        raise DeployError(problem)


def _works(pid: int) -> bool:
    """Return True if a worker among the descendants of a process works for an actor or a task."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = " ".join(process.cmdline())
                if title.startswith("ray::") and not title.startswith(IDLE):
                    return True
    return False


def _end(node: "subprocess.Popen[bytes]") -> None:
    """End Ray's processes of this node; by force after END_SECONDS."""
    node.terminate()
    try:
        node.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(node.pid).children(recursive=True), node]:
            process.kill()
        node.wait()
