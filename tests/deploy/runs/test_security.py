"""Security of a run: its sockets, its cluster, and the data that it accepts.

Its secrets are those of `red_team/test_runs.py`.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.deploy.running import ACTOR, ENDLESS, RANK, Running

ROOT = Path(__file__).parents[3]
PACKAGES = ("actors", "deploy", "learner", "queues", "weight_sync")
UNPICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
"""Modules that unpickle, and so run code that is in the bytes."""
RAN = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(400)]


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_nothing_is_unpickled_but_by_ray_itself():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                renamed = {alias.name.split(".")[0] for alias in node.names if alias.asname}
                assert not renamed & UNPICKLES, where
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in UNPICKLES:
                assert node.attr == "dumps", where
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in UNPICKLES, where
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = [key for key in node.keywords if key.arg == "weights_only"]
                assert [ast.unparse(key.value) for key in safe] == ["True"], where


def test_nothing_turns_off_that_ray_asks_for_a_token():
    for path in [*sources(), *sorted((ROOT / "deploy").rglob("*.y*ml"))]:
        text = path.read_text()
        assert "disabled" not in text or "AUTH_MODE" not in text, path.relative_to(ROOT)


@pytest.fixture(scope="module")
def run(headway):
    """Yield a run that has trained some batches."""
    settings = (*ENDLESS, "learner.ranks=2", "actors.cpus=0")
    with Running(headway, "kept", *settings) as run:
        run.trains(3)
        yield run


class TestARun:
    pytestmark = RAN

    def test_every_socket_that_listens_is_on_loopback(self, run):
        processes = psutil.Process(run.process.pid)
        listening = [
            (process.name(), socket.laddr)
            for process in (processes, *processes.children(recursive=True))
            for socket in process.net_connections(kind="inet")
            if socket.status == psutil.CONN_LISTEN
        ]
        assert run.titled(ACTOR)
        assert run.titled(RANK)
        assert len(listening) > 5
        elsewhere = [
            (name, address) for name, address in listening if not address.ip.endswith("127.0.0.1")
        ]
        assert not elsewhere

    def test_who_has_no_token_is_not_let_into_the_cluster(self, run, tmp_path):
        below = psutil.Process(run.process.pid).children(recursive=True)
        [store] = [process for process in below if process.name() == "gcs_server"]
        ports = [
            socket.laddr.port
            for socket in store.net_connections(kind="inet")
            if socket.status == psutil.CONN_LISTEN
        ]
        program = (
            "import sys\n"
            "from ray._raylet import GcsClient\n"
            "store = GcsClient(address=sys.argv[1])\n"
            "print('let in', len(store.get_all_node_info(timeout=60)))\n"
        )
        asked = (
            ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32}, False),
            ({"RAY_AUTH_MODE": "disabled"}, False),
            ({"RAY_AUTH_MODE": "token"}, True),
        )
        for changes, let_in in asked:
            done = subprocess.run(
                [sys.executable, "-c", program, f"127.0.0.1:{ports[0]}"],
                env={**os.environ, **changes},
                cwd=tmp_path, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert ("let in 1" in done.stdout) == let_in, done.stdout + done.stderr
            assert let_in or "token" in done.stderr.lower()
