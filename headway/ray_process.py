"""Adapter of the parts of Ray that have no public name: processes, nodes, loopback.

No other module uses such names, so that another version of Ray changes this one alone.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import ray
from ray._private import parameter, ray_constants, state
from ray.exceptions import RayError, RuntimeEnvSetupError

from headway.errors import first_line
from headway.metrics import Collectors, MetricsAccess, MetricsServer, public_address

P = ParamSpec("P")
T = TypeVar("T")

RENEWED_SECONDS = 0.5
"""Interval of renewal of a title: Ray overwrites it after every call of the actor."""
LOOPBACK_VARIABLE: str = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
"""Environment variable that is "0" for clusters which listen at 127.0.0.1."""


async def keep_title(name: str, describe: Callable[[], str]) -> NoReturn:
    """Keep the title of this process up to date until cancelled, as `ps` and Ray's pages show it.

    `name` is the actor's class; `describe` returns in a few words who it is and what it does.
    """
    while True:
        ray._raylet.setproctitle(f"ray::{name} {describe()}")
        await asyncio.sleep(RENEWED_SECONDS)


def serve_metrics(collectors: Collectors, access: MetricsAccess) -> str:
    """Serve collectors at a free port until this process of Ray ends; return its host:port."""
    port = MetricsServer(collectors, access).port
    return public_address(access.host, port, ray.util.get_node_ip_address())


async def call_in(
    handle: Any, function: Callable[Concatenate[Any, P], T], *args: P.args, **options: P.kwargs
) -> T:
    """Call a function in the process of an actor, which is its first argument."""
    answer: T = await handle.__ray_call__.remote(function, *args, **options)
    return answer


def is_placed(handle: Any) -> bool:
    """Return True if Ray has placed an actor and started its process."""
    return bool(_record(handle).get("State") == "ALIVE")


def node_of(handle: Any) -> str | None:
    """Return Ray's id of the node of an actor; None while Ray has not placed it."""
    return _record(handle).get("Address", {}).get("NodeID") or None


def _record(handle: Any) -> Mapping[str, Any]:
    record: Mapping[str, Any] = state.actors(handle._actor_id.hex())
    return record


def draining_nodes() -> set[str]:
    """Return Ray's ids of the nodes that it drains."""
    return {*state.state.get_draining_nodes()}


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return what nobody holds of each node at the moment, by Ray's id of the node."""
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return free


def death_of(error: RayError) -> str:
    """Return on one line how a process ended: the error of its own creation, if it raised one."""
    if getattr(error, "actor_init_failed", False) or isinstance(error, RuntimeEnvSetupError):
        return str(error).strip().splitlines()[-1]
    return first_line(error)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make a cluster that is started in the block listen at 127.0.0.1 alone, as Ray would not.

    The agent of its node takes a free port: where another cluster has Ray's, it tries for 3 s.
    """
    variable, before = os.environ.get(LOOPBACK_VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    parameters = parameter.RayParams
    parameter.RayParams = partial(parameters, dashboard_agent_listen_port=0)
    os.environ[LOOPBACK_VARIABLE], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        parameter.RayParams, ray_constants.ENABLE_RAY_CLUSTER = parameters, before
        if variable is None:
            del os.environ[LOOPBACK_VARIABLE]
        else:
            os.environ[LOOPBACK_VARIABLE] = variable
