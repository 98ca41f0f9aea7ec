"""The nodes of a cluster are asked all at once, and those that are late are named."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayTaskError

from deploy.cluster import ray_cluster as cluster
from deploy.cluster.placement import Node
from deploy.config.loader import load_recipe
from deploy.errors import RayDied, RunFailed
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


@pytest.fixture
def servers(tmp_path):
    """Provide processes with the names of Ray's servers, which do nothing."""
    started = {}
    for name in cluster.SERVERS:
        shutil.copy(shutil.which("sleep"), tmp_path / name)
        started[name] = subprocess.Popen([tmp_path / name, "60"])
    yield started
    for process in started.values():
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("name", cluster.SERVERS)
def test_a_server_of_ray_that_is_killed_is_noticed_at_once_and_named(servers, name):
    async def kill():
        watching = asyncio.create_task(cluster.fail_with_ray())
        await asyncio.sleep(0)
        assert not watching.done()
        servers[name].kill()
        await asyncio.wait_for(watching, 10)

    died = f"Ray's {name} on this machine died"
    with pytest.raises(RayDied, match=died):
        asyncio.run(kill())
    with pytest.raises(RayDied, match=died):  # it was gone before anyone watched it
        asyncio.run(cluster.fail_with_ray())


@pytest.mark.parametrize("name", cluster.SERVERS)
def test_a_server_of_ray_that_is_stopped_is_killed(monkeypatch, servers, name):
    monkeypatch.setattr(cluster, "STOPPED_SECONDS", 0.3)
    servers[name].send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    with pytest.raises(RayDied, match=f"Ray's {name} on this machine died"):
        asyncio.run(asyncio.wait_for(cluster.fail_with_ray(), 10))
    assert servers[name].wait(10) == -signal.SIGKILL
    assert time.monotonic() - stopped_at >= 0.3


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Stand for a cluster that starts here; provide the folder of its logs."""
    output = tmp_path / "session" / "logs"
    output.mkdir(parents=True)
    address_info = {"session_dir": str(output.parent)}
    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(address_info=address_info))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "_check_nodes", lambda *_, **__: None)
    return output


@pytest.mark.reported("agent_killed")
@pytest.mark.parametrize(
    ("struck", "logged", "name"),
    [
        ("gcs_server", "", "gcs_server"),
        ("raylet", "", "raylet"),
        ("raylet", "dashboard_agent", "DashboardAgent"),
        ("raylet", "runtime_env_agent", "RuntimeEnvAgent"),
    ],
)
@pytest.mark.parametrize(
    "first", [RunFailed("broker: the broker is gone"), InputError("it cannot hold this run")]
)
def test_what_follows_the_death_of_a_process_of_ray_counts_as_that_death(
    servers, started, tmp_path, struck, logged, name, first
):
    """A raylet writes which of its agents has died, and ends its workers before itself."""
    text = f"The raylet exited immediately because one Ray agent failed, agent_name = {logged}.\n"
    expected = f"Ray's {name} on this machine died, and with it all processes of the run"

    def run():
        with cluster.cluster(load_recipe("demo"), tmp_path):
            (started / "raylet.out").write_text(text if logged else "")
            servers[struck].kill()
            if isinstance(first, InputError):  # is raised since Ray knows of the death
                servers[struck].wait(10)
            raise first

    with pytest.raises(RayDied, match=expected) as died:
        run()
    assert died.value.__cause__ is first


def test_an_error_of_a_run_whose_ray_lives_is_raised_as_it_is(
    monkeypatch, servers, started, tmp_path
):
    monkeypatch.setattr(cluster, "FOLLOWS_SECONDS", 0.1)
    with (
        pytest.raises(RunFailed, match="a bug") as failed,
        cluster.cluster(load_recipe("demo"), tmp_path),
    ):
        raise RunFailed("a bug")
    assert not isinstance(failed.value, RayDied)


@pytest.mark.reported("first_start")
@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RuntimeError("Failed to start GCS. Last 4 lines of error files: …"), True),
        (Exception("The current node timed out during startup"), True),
        (TimeoutError("no answer"), True),
        (ConnectionError("the GCS does not answer"), True),
        (BlockingIOError(11, "Resource temporarily unavailable"), True),
        (OSError("AF_UNIX path length cannot exceed 107 bytes: /tmp/…"), False),
        (ValueError("num_cpus must not be negative"), False),
    ],
)
def test_a_ray_that_does_not_start_is_tried_again_unless_it_refuses_what_it_is_given(
    monkeypatch, tmp_path, error, passes
):
    def init(*, _temp_dir, **_):
        logs = Path(_temp_dir) / "session_2026" / "logs"
        logs.mkdir(parents=True)
        (logs / "gcs_server.out").touch()
        raise error

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(RunFailed, match="not start on this machine, its gcs_server died") as failed,
        cluster.cluster(load_recipe("demo"), tmp_path),
    ):
        pass
    assert isinstance(failed.value, RayDied) == passes


def test_a_start_of_ray_that_hangs_is_ended_after_its_deadline(monkeypatch, servers, tmp_path):
    def init(**_):
        for server in servers.values():
            server.wait(10)
        raise ConnectionError("the GCS is gone")

    monkeypatch.setattr(cluster, "START_SECONDS", 0.1)
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(RayDied, match="Ray did not start on this machine: the GCS is gone"),
        cluster.cluster(load_recipe("demo"), tmp_path),
    ):
        pass


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
