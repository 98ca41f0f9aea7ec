"""The nodes of a cluster are asked all at once, and those that are late are named."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import threading
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayTaskError

from deploy.cluster import ray_cluster as cluster
from deploy.cluster.placement import Node
from deploy.config.loader import load_recipe
from deploy.errors import RayletDied, RunFailed
from headway.errors import InputError

NODES = [Node(node_id=name * 56, address=name, resources={}, labels={}) for name in "abc"]


def asked(monkeypatch, **answers):
    """Stand for Ray, with what each node answers, None for none; return what happens."""
    events = []

    def options(*, num_cpus, scheduling_strategy):
        name = scheduling_strategy.node_id[0]
        return SimpleNamespace(remote=lambda: events.append(("ask", name)) or name)

    def wait(asked, *, num_returns, timeout):
        events.append(("wait", num_returns, timeout))
        late = [name for name in asked if answers[name] is None]
        return [name for name in asked if name not in late], late

    def get(name):
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    ask = SimpleNamespace(options=options)
    monkeypatch.setattr(
        cluster, "ray", SimpleNamespace(remote=lambda function: ask, wait=wait, get=get)
    )
    return events


def test_nodes_are_asked_all_before_one_is_waited_for(monkeypatch):
    events = asked(monkeypatch, a={"ray": "1"}, b={"ray": "2"}, c={"ray": "3"})
    assert cluster.versions_of(NODES) == [{"ray": "1"}, {"ray": "2"}, {"ray": "3"}]
    wait = ("wait", 3, cluster.VERSIONS_SECONDS)
    assert events == [("ask", "a"), ("ask", "b"), ("ask", "c"), wait]


def test_late_nodes_are_named(monkeypatch):
    asked(monkeypatch, a=None, b={}, c=None)
    with pytest.raises(RunFailed, match=r"node\(s\) a, c did not report their versions within"):
        cluster.versions_of(NODES)


def test_a_node_without_headway_is_named(monkeypatch):
    failure = RayTaskError("installed", "No module named 'deploy'", ImportError())
    asked(monkeypatch, a={}, b=failure, c={})
    with pytest.raises(InputError, match=r"node b has no Headway that can be imported"):
        cluster.versions_of(NODES)


def test_a_raylet_that_is_killed_is_noticed_at_once(monkeypatch):
    monkeypatch.setattr(cluster, "RAYLET", "sleep")

    async def kill(raylet):
        watching = asyncio.create_task(cluster.fail_with_raylet())
        await asyncio.sleep(0)
        assert not watching.done()
        raylet.kill()
        with pytest.raises(RayletDied, match="raylet on this machine died"):
            await asyncio.wait_for(watching, 10)

    with subprocess.Popen(["sleep", "60"]) as raylet:
        asyncio.run(kill(raylet))
    with pytest.raises(RayletDied):  # it was gone before anyone watched it
        asyncio.run(cluster.fail_with_raylet())


def test_a_raylet_that_is_stopped_is_killed(monkeypatch):
    monkeypatch.setattr(cluster, "RAYLET", "sleep")
    monkeypatch.setattr(cluster, "RAYLET_SECONDS", 0.05)
    with subprocess.Popen(["sleep", "60"]) as raylet:
        raylet.send_signal(signal.SIGSTOP)
        with pytest.raises(RayletDied):
            asyncio.run(asyncio.wait_for(cluster.fail_with_raylet(), 10))
        assert raylet.wait(10) == -signal.SIGKILL


def test_a_cluster_of_one_node_is_not_asked():
    assert cluster.versions_of([]) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["deploy.ray_address=auto"], {cluster.NO_GPUS: "1"}),
        (
            ["deploy.ray_address=auto", "deploy.environment.NCCL_DEBUG=WARN"],
            {cluster.NO_GPUS: "1", "NCCL_DEBUG": "WARN"},
        ),
        (["deploy.ray_address=auto", f"deploy.environment.{cluster.NO_GPUS}='0'"],
         {cluster.NO_GPUS: "0"}),
        (["deploy.environment.NCCL_DEBUG=WARN"], {"NCCL_DEBUG": "WARN"}),
        ([], None),
    ],
)  # fmt: skip
def test_processes_of_a_joined_cluster_without_gpus_of_their_own_see_none(
    monkeypatch, tmp_path, settings, expected
):
    """Those of a cluster that is started here inherit the variable."""
    given = {}

    def init(**options):
        given.update(options)
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv(cluster.NO_GPUS, raising=False)
    with (
        pytest.raises((InputError, RunFailed), match="no cluster"),
        cluster.cluster(load_recipe("demo", settings), tmp_path),
    ):
        pass
    assert given.get("runtime_env", {}).get("env_vars") == expected
    assert os.environ[cluster.NO_GPUS] == "1"


@pytest.mark.ray
@pytest.mark.slow
def test_processes_get_the_environment_of_the_recipe_beside_their_own(tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:  # without Ray
        assert process.submit(environment_of_a_task, tmp_path).result() == ["WARN", "3"]


def environment_of_a_task(logs):
    config = load_recipe("demo", ["deploy.environment.NCCL_DEBUG=WARN"])
    own = {"env_vars": {"OMP_NUM_THREADS": "3"}}
    with cluster.cluster(config, logs):
        ask = ray.remote(os.getenv).options(num_cpus=0, runtime_env=own)
        return ray.get([ask.remote("NCCL_DEBUG"), ask.remote("OMP_NUM_THREADS")])


def test_an_address_that_does_not_answer_is_refused_after_a_deadline(monkeypatch, tmp_path):
    hung = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **_: hung.wait(30))
    monkeypatch.setattr(cluster, "JOIN_SECONDS", 0.05)
    config = load_recipe("demo", ["deploy.ray_address=127.0.0.1:1"])
    message = r"ray_address = '127.0.0.1:1': no cluster answered there within 0.05 s"
    with pytest.raises(InputError, match=message), cluster.cluster(config, tmp_path):
        pass
    hung.set()
