"""Security of a run: its sockets, its secrets, and the data that it accepts."""

import ast
import http.server
import itertools
import json
import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from tests.deploy.running import ACTOR, ENDLESS, RANK, Running

ROOT = Path(__file__).parents[3]
PACKAGES = ("actors", "deploy", "learner", "queues", "weight_sync")
UNPICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
"""Modules that unpickle, and so run code that is in the bytes."""
SECRETS = {
    "WANDB_API_KEY": "wandb-3f1c0b7d9a",
    "JUDGE_KEY": "judge-77aa01c4e2",
    "SOME_PASSWORD": "password-5b2e9f8810",
}
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


class Marks(http.server.BaseHTTPRequestHandler):
    """An HTTP server of a judge that refuses every 50th request and records their keys."""

    keys: ClassVar = set()
    count: ClassVar = itertools.count(1)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.add(self.headers["Authorization"])
        answer = json.dumps({"choices": [{"message": {"content": "5"}}]}).encode()
        refuses = next(self.count) % 50 == 0
        self.send_response(401 if refuses else 200)
        self.end_headers()
        self.wfile.write(
            b"bad key " + self.headers["Authorization"].encode() if refuses else answer
        )

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def judge():
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Marks)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield (
        "actors.reward=['llm_judge']",
        f"actors.reward_options={{llm_judge={{url='http://127.0.0.1:{listening.server_port}/v1',"
        "model='m',key_variable='JUDGE_KEY'}}",
        "deploy.max_failed_groups=100000",
    )
    listening.shutdown()
    listening.server_close()


@pytest.fixture(scope="module")
def run(headway, judge):
    """Yield a run that has trained some batches, whose environment has secrets."""
    settings = (*ENDLESS, "learner.ranks=2", "actors.cpus=0", *judge)
    with Running(headway, "kept", *settings, environment=SECRETS) as run:
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

    def test_no_secret_of_the_environment_is_written_anywhere(self, run):
        run.process.terminate()
        run.ends(130)
        recipe = tomllib.loads((run.folder / "recipe.toml").read_text())
        options = recipe["actors"]["reward_options"]["llm_judge"]
        assert options["key_variable"] == "JUDGE_KEY"
        assert Marks.keys == {f"Bearer {SECRETS['JUDGE_KEY']}"}
        written = [run.file, *(path for path in run.folder.rglob("*") if path.is_file())]
        assert any(path.parent.name == "logs" for path in written)
        for path in written:
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in SECRETS.values()), path
