"""Starts the Ray cluster of a run on this machine, or joins an existing one."""

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster.cleanup import (
    ending_workers,
    lives,
    private_folder,
    reaping_orphans,
    removing_memory,
)
from deploy.cluster.placement import NODE_LABEL, Node, lacking, resource_requests, roles_of
from deploy.cluster.versions import VARIABLE, differences, installed, needed
from deploy.cluster.worker_logs import collect_ray_logs, collect_worker_logs
from deploy.config.run_config import RunConfig
from deploy.errors import RayDied, RunFailed
from deploy.runtime.session_process import LOOKS, STOPPED_SECONDS
from deploy.runtime.signals import deferred, without_hangups
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import InputError, first_line, is_bad_input
from headway.ray_process import LOOPBACK_VARIABLE, on_loopback
from headway.user_code import CODE_DIR

NO_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Variable by which Ray hides all GPUs from processes that have reserved none."""
COLOURS = "RAY_COLOR_PREFIX"
"""Variable that is "0" where Ray is to print no codes of colours, also in the file of a log."""
SERVERS = ("gcs_server", "raylet")
"""Ray's processes without which no other goes on: of the cluster, and of its only node."""
FOLLOWS_SECONDS = 3.0
"""Time in which one of them is found dead after another process of the run."""
AGENT = re.compile(rb"because one Ray agent failed, agent_name = (\w+)")
"""Ray's log of a raylet that ends since one of its agents has died."""
START_SECONDS = 180.0
"""Deadline of a start on this machine: some seconds, or a minute where cores are short."""
JOIN_SECONDS = 90.0
"""Deadline of a cluster to join, for which Ray itself tries again for many minutes."""
VERSIONS_SECONDS = 60.0
"""Deadline of the nodes' answers, which have to start their first process."""
SIZES = "actors.count, actors.cpus, actors.gpus, learner.ranks, learner.gpus"
"""Keys that decide what a run needs of its nodes."""


@contextmanager
def cluster(
    config: RunConfig, logs: Path, *, may_lack: bool = False, sizes: str = SIZES
) -> Iterator[Path | None]:
    """Connect to Ray for the block; a cluster that was started on this machine ends with it.

    Such a cluster leaves no zombie and no folder; only this user may read its folder meanwhile,
    which is yielded: Ray keeps the output of the processes there, until it is copied to `logs`.
    A joined cluster yields None, and `may_lack` what the run needs: it may have lost nodes. Raises
    InputError, with the keys of `sizes`, if its nodes lack what the run needs; or if none answers
    at the address, and RunFailed if Ray did not start here, or a node did not answer in time.
    """
    os.environ.setdefault(NO_GPUS, "1")
    os.environ.setdefault(COLOURS, "0")
    address = config.deploy.ray_address
    local = address == "local"
    with ExitStack() as own:
        # Processes of another cluster do not inherit the environment of this one.
        folders = {CODE_DIR: os.environ[CODE_DIR]} if CODE_DIR in os.environ else {}
        inherited = {} if local else {NO_GPUS: "1", **folders}
        variables = {**inherited, **config.deploy.environment}
        options: dict[str, Any] = {"runtime_env": {"env_vars": variables}} if variables else {}
        if local:
            own.enter_context(reaping_orphans())
            folder = own.enter_context(private_folder(logs.parent))
            own.enter_context(removing_memory(folder))
            options |= {"include_dashboard": False, "_temp_dir": str(folder / "ray")}
        context = _connect(address, options)
        output = Path(context.address_info["session_dir"]) / "logs"
        servers = _servers() if local else {}
        try:
            _check_nodes(config, sizes, may_lack=may_lack and not local)
            yield output if local else None
        except Exception as error:
            if local:
                collect_ray_logs(output, logs)
            seconds = 0.0 if is_bad_input(error) else FOLLOWS_SECONDS
            if local and (name := _dead(servers, seconds)) is not None:
                raise _died(_agent(output) or name) from error
            raise
        finally:
            with deferred():
                with ending_workers():  # only those below this process
                    ray.shutdown()
                if local:
                    collect_worker_logs(output, logs)


def _connect(address: str, options: dict[str, Any]) -> Any:
    local = address == "local"
    connect = partial(
        ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR, **options
    )
    try:
        with deferred(), without_hangups(), on_loopback() if local else nullcontext():
            if local:  # its processes end with the thread that starts them
                with _ended_after(START_SECONDS):
                    return connect()
            return asyncio.run(asyncio.wait_for(run_in_daemon_thread(connect), JOIN_SECONDS))
    except KeyboardInterrupt:
        ray.shutdown()
        raise
    except Exception as error:  # Ray raises bare Exceptions too
        if local:
            logs, alive = Path(options["_temp_dir"]).glob("session_[0-9]*/logs/*.out"), _servers()
            died = sorted(x.stem for x in logs if x.stem in SERVERS and x.stem not in alive)
            ray.shutdown()
            # A setting that Ray refuses, such as a path too long for a socket, is refused again.
            refused = isinstance(error, ValueError) or type(error) is OSError
            who = f", its {' and '.join(died)} died" if died else ""
            raise (RunFailed if refused else RayDied)(
                f"Ray did not start on this machine{who}: {error}"
            ) from error
        if isinstance(error, TimeoutError):
            raise InputError(
                f"deploy.ray_address = {address!r}: no cluster answered there within "
                f"{JOIN_SECONDS:g} s; try `ray status --address {address}`"
            ) from None
        ray.shutdown()
        raise InputError(f"deploy.ray_address = {address!r}: {error}") from None


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Kill the servers of a start that takes longer, by which it fails instead of hanging."""

    def end() -> None:
        for server in _servers().values():
            with suppress(psutil.NoSuchProcess):
                server.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


async def fail_with_ray() -> NoReturn:
    """Wait until a server of the cluster that this process has started dies; raise RayDied.

    All other processes of the cluster end with it, but calls of them may not be answered for many
    minutes. One that a signal has stopped is killed: Ray would give up its node, the only one.
    """
    servers = _servers()
    deaths = [asyncio.create_task(_await_death(server)) for server in servers.values()]
    try:
        if len(servers) == len(SERVERS):
            await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for death in deaths:
            death.cancel()
    raise _died(_dead(servers) or "raylet")


def _servers() -> dict[str, psutil.Process]:
    """Return those of SERVERS that this process has started and that live, by name."""
    servers = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if (name := child.name()) in SERVERS and lives(child):
                servers[name] = child
    return servers


async def _await_death(process: psutil.Process) -> None:
    """Wait until a process has ended; kill one that is stopped for STOPPED_SECONDS."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        descriptor, stopped = os.pidfd_open(process.pid), 0
        loop.add_reader(descriptor, ended.set)
        try:
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), STOPPED_SECONDS / LOOKS)
                stopped = stopped + 1 if process.status() == psutil.STATUS_STOPPED else 0
                if stopped > LOOKS:
                    process.kill()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _dead(servers: Mapping[str, psutil.Process], seconds: float = 0.0) -> str | None:
    """Return the name of a server that is dead, or dies within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        for name in SERVERS:
            if name not in servers or not lives(servers[name]):
                return name
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)


def _agent(logs: Path) -> str | None:
    """Return the title of the agent whose death has ended a raylet; None if none has."""
    for file in logs.glob("raylet.*"):
        with suppress(OSError):
            if agents := AGENT.findall(file.read_bytes()):
                return "".join(part.capitalize() for part in agents[-1].decode().split("_"))
    return None


def _died(name: str) -> RayDied:
    return RayDied(f"Ray's {name} on this machine died, and with it all processes of the run")


def _check_nodes(config: RunConfig, sizes: str, *, may_lack: bool) -> None:
    """Compare the run's requests with the nodes' resources, and the nodes' versions with ours."""
    address = config.deploy.ray_address
    nodes = alive_nodes()
    driver_node = ray.get_runtime_context().get_node_id()
    requests = resource_requests(config, driver_node=driver_node)
    if not may_lack and (lacks := lacking(requests, nodes)):
        raise InputError(
            f"the Ray cluster at {address!r} cannot hold this run; change {sizes} or "
            "deploy.placement, or add nodes first:\n  " + "\n  ".join(lacks)
        )
    if address == "local":
        return
    ours = installed()
    sent = json.loads(os.environ.get(VARIABLE, "{}"))
    differ = differences(sent, ours, where="the driver's node, against the submitter,")
    others = [node for node in nodes if node.node_id != driver_node]
    for node, theirs in zip(others, versions_of(others), strict=True):
        expected = needed(ours, roles_of(node, requests))
        differ += differences(expected, theirs, where=f"node {node.address}")
    if differ:
        raise InputError(
            f"versions on the Ray cluster at {address!r} differ:\n  " + "\n  ".join(differ)
        )


def status_command(address: str) -> str:
    """Return the shell command that shows nodes and load of the connected cluster."""
    # One of this machine listens at 127.0.0.1, which Ray would replace, and asks for its token.
    command = f"ray status --address {ray.get_runtime_context().gcs_address}"
    if address != "local":
        return command
    return f"RAY_AUTH_MODE=token {LOOPBACK_VARIABLE}=0 {command}"


def alive_nodes() -> list[Node]:
    """Return the nodes of the cluster that are alive."""
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            labels={**(node.get("Labels") or {}), NODE_LABEL: node["NodeID"]},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def versions_of(nodes: Sequence[Node]) -> list[dict[str, str]]:
    """Ask all nodes at once for the versions that they have installed.

    Raises RunFailed that names those without an answer within VERSIONS_SECONDS, and InputError if
    Headway cannot be imported on one of them.
    """
    if not nodes:
        return []
    ask = ray.remote(installed)
    answers = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        answers[ask.options(num_cpus=0, scheduling_strategy=strategy).remote()] = node.address
    _, late = ray.wait([*answers], num_returns=len(answers), timeout=VERSIONS_SECONDS)
    if late:
        addresses = ", ".join(answers[answer] for answer in late)
        raise RunFailed(
            f"node(s) {addresses} did not report their versions within {VERSIONS_SECONDS:g} s"
        )
    versions = []
    for answer, address in answers.items():
        try:
            versions.append(ray.get(answer))
        except RayError as error:
            raise InputError(
                f"node {address} has no Headway that can be imported: {first_line(error)}"
            ) from None
    return versions
