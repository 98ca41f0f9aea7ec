"""Runs as jobs of a cluster: what is sent, and a real cluster that is submitted to."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy.cluster.jobs import check, command_of, files_of, pack
from deploy.config.loader import load_recipe, read_recipe
from headway.errors import InputError
from queues.readers.checkpoints import newest_checkpoint
from tests.deploy.conftest import read_rows
from tests.deploy.running import WAIT_SECONDS
from tests.waiting import until

RECIPE = Path(__file__).parents[1] / "recipe.toml"
ON_CLUSTER = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]


@pytest.fixture
def modules(tmp_path):
    folder = tmp_path / "mine"
    (folder / "package" / "__pycache__").mkdir(parents=True)
    (folder / "runs").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "part.py").write_text("")
    (folder / "scores.py").write_text("")
    (folder / "helper.py").write_text("")
    (folder / "other.py").write_text("")
    return folder


def names(paths):
    return sorted(path.name for path in paths)


def test_modules_that_the_recipe_names_are_sent_and_others_when_asked_for(modules):
    config = load_recipe("demo", ['actors.reward=["scores:value", "package.part:value"]'])
    assert names(files_of(config, [], modules)) == ["package", "scores.py"]
    assert names(files_of(config, ["helper"], modules)) == ["helper.py", "package", "scores.py"]


def test_a_module_that_is_not_there_is_refused_by_name(modules):
    with pytest.raises(InputError, match=r"--module nobody: neither nobody.py nor a folder"):
        files_of(load_recipe("demo"), ["nobody"], modules)


def test_a_module_in_folders_without_modules_of_their_own_is_sent_with_them(modules):
    deep = modules / "spread" / "sub"
    deep.mkdir(parents=True)
    (deep / "part.py").write_text("")
    (modules / "scores").mkdir()
    config = load_recipe("demo", ['actors.reward=["spread.sub.part:value", "scores:value"]'])
    assert names(files_of(config, [], modules)) == ["scores.py", "spread"]


def test_what_is_sent_lies_flat_with_the_recipe_under_one_name(modules, tmp_path):
    sent = tmp_path / "sent"
    sent.mkdir()
    mine = shutil.copy(RECIPE, tmp_path / "mine.txt")
    pack([modules / "package", modules / "scores.py"], mine, sent)
    assert (sent / "recipe.toml").read_text() == RECIPE.read_text()
    names = sorted(str(path.relative_to(sent)) for path in sent.rglob("*.*"))
    assert names == ["package/__init__.py", "package/part.py", "recipe.toml", "scores.py"]


def test_a_job_does_on_the_head_node_what_the_user_asked_for():
    assert command_of("demo", ["steps=3", "name=a b"], replace=True) == (
        "headway run demo --set steps=3 --set 'name=a b' --set deploy.ray_address=auto --replace"
    )
    auto = "--set deploy.ray_address=auto"
    assert command_of(str(RECIPE), [], before=["sft", "reward-model"]) == (
        f"headway sft recipe.toml {auto} && headway reward-model recipe.toml {auto} && "
        f"headway run recipe.toml {auto}"
    )
    assert command_of("demo", ["name=mine"], resume=True) == (
        "headway run demo --set name=mine --set deploy.ray_address=auto --resume"
    )


def test_a_job_that_goes_on_with_a_run_and_begins_anew_is_refused():
    with pytest.raises(InputError, match=r"--replace begins anew"):
        command_of("demo", [], replace=True, resume=True)
    with pytest.raises(InputError, match=r"--sft begins anew"):
        command_of("demo", [], resume=True, before=["sft"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], 'deploy.runs_dir = "runs" is relative'),
        (["deploy.runs_dir=mine/runs"], 'deploy.runs_dir = "mine/runs" is relative'),
        (["deploy.runs_dir=~/runs"], 'deploy.runs_dir = "~/runs" is in the home of whoever'),
    ],
)
def test_a_run_folder_that_is_not_one_of_the_head_node_is_refused(settings, message):
    with pytest.raises(InputError, match=re.escape(message)):
        check(read_recipe("demo", settings))
    check(read_recipe("demo", [*settings, "deploy.runs_dir=/data/runs"]))


class Cluster:
    """A head node of its own, started and ended as users do."""

    def __init__(self, folder, environment):
        port, client_port, agent_port = free_port(), free_port(), free_port()
        self.address = f"http://127.0.0.1:{port}"
        ray = Path(sys.executable).parent / "ray"
        command = [
            ray, "start", "--head", "--block", "--port=0", f"--dashboard-port={port}",
            f"--ray-client-server-port={client_port}",
            f"--dashboard-agent-listen-port={agent_port}", "--min-worker-port=0",
            "--max-worker-port=0", f"--temp-dir={folder}", "--num-cpus=4", "--disable-usage-stats",
        ]  # fmt: skip
        path = f"{ray.parent}:{os.environ['PATH']}"
        self.log = folder / "head.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**environment, "PATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"},
            )  # fmt: skip

    def until(self, condition):
        until(condition, WAIT_SECONDS, process=self.process, output=self.log.read_text)

    def end(self):
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(60)
        _, alive = psutil.wait_procs(below, timeout=30)
        for process in alive:
            process.kill()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(headway, tmp_path_factory):
    folder = Path(f"/tmp/headway-ray-{os.getpid()}")  # sockets want a short path
    folder.mkdir()
    made = Cluster(folder, headway.environment)
    try:
        made.until(lambda: "runtime started" in made.log.read_text())
        (headway.folder / "mine.py").write_text(
            "from helper import value\n"
            "def score(prompt, completion, answer, metadata): return value(completion)\n"
        )
        (headway.folder / "helper.py").write_text("def value(text): return float(len(text) % 3)\n")
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


def submitted(headway, cluster, name, *settings, more=()):
    """Return the arguments of a submission."""
    fixed = (f"name={name}", "sft.name=small", f"deploy.runs_dir={headway.folder / 'runs'}")
    submission = headway.arguments("submit", *fixed, *settings)[1:]
    return [*submission, "--address", cluster.address, *more]


def job_of(output):
    [line] = [line for line in output.splitlines() if line.startswith("job ")]
    return line.split()[1].rstrip(";")


class TestOnACluster:
    pytestmark = ON_CLUSTER

    def test_a_job_runs_with_the_users_modules_and_ends_with_its_exit_code(self, headway, cluster):
        more = ("--module", "helper", "--wait", "--sft")
        settings = ("steps=3", "actors.reward=['mine:score']", "sft.name=of-the-job")
        done = headway(*submitted(headway, cluster, "job", *settings, more=more))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "job: done" in done.stdout
        assert (headway.folder / "runs" / "of-the-job-sft" / "model").is_dir()
        rows = read_rows(headway.run_folder("job") / "metrics.jsonl")
        assert any(row["reward_mean"] for row in rows)
        again = headway("attach", job_of(done.stdout), "--address", cluster.address)
        assert again.returncode == 0
        assert "job: done" in again.stdout

    def test_what_the_cluster_lacks_is_named_before_anything_starts(self, headway, cluster):
        settings = (
            "weight_sync.transport=object_store",
            'deploy.placement.actors={labels={pool="generate"}}',
        )
        done = headway(*submitted(headway, cluster, "lacking", *settings, more=["--wait"]))
        assert done.returncode == 2, done.stdout + done.stderr
        assert "on nodes labelled pool=generate; no node is" in done.stdout.replace("\n", " ")
        assert not (headway.folder / "runs" / "lacking").exists()

    def test_a_job_outlives_its_terminal_is_cancelled_with_a_checkpoint_and_goes_on(
        self, headway, cluster
    ):
        folder = headway.folder / "runs" / "long"
        arguments = submitted(headway, cluster, "long", "steps=600")
        first = headway(*arguments)
        assert first.returncode == 0, first.stderr
        job = job_of(first.stdout)
        terminal = headway.start_plain("attach", job, "--address", cluster.address)
        metrics = folder / "metrics.jsonl"
        cluster.until(lambda: len(read_rows(metrics)) > 4)
        os.killpg(terminal.pid, signal.SIGKILL)
        terminal.wait(30)
        terminal.stdout.close()
        before = len(read_rows(metrics))
        cluster.until(lambda: len(read_rows(metrics)) > before + 4)
        targets = json.loads((folder / "targets.json").read_text())
        [driver] = [target for target in targets if target["labels"]["process"] == "driver"]
        seen = headway("top", driver["targets"][0], "--once")
        assert seen.returncode == 0, seen.stderr
        assert "long  version" in seen.stdout
        assert "of 600" in seen.stdout
        assert "actor-0" in seen.stdout
        cancelled = headway("cancel", job, "--address", cluster.address)
        assert cancelled.stdout.split() == ["job", f"{job}:", "STOPPED"], cancelled.stderr
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        version, _ = newest_checkpoint(folder)
        assert version > before
        refused = headway(*arguments, "--resume", "--wait", "--set", "actors.temperature=0.9")
        assert refused.returncode == 2
        assert "actors.temperature: 1.0 → 0.9: rollouts in its ledger" in refused.stdout
        where = ("--set", f"deploy.runs_dir={headway.folder / 'runs'}", "--set", "name=long")
        again = [
            *("submit", RECIPE, *where, "--address", cluster.address),
            *("--set", "sft.name=small", "--resume"),
        ]
        live = job_of(headway(*again).stdout)
        same = headway(*again, "--wait")
        assert job_of(same.stdout) == live, "a second command follows the job that goes on"
        assert same.returncode == 0, same.stdout + same.stderr
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["version"]) == ("done", 600)
        assert summary["accounting"]["trained_twice"] == 0

    def test_a_job_that_is_not_there_is_refused_with_those_that_are(self, headway, cluster):
        done = headway("attach", "nobody", "--address", cluster.address)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "no job 'nobody' on the cluster" in done.stderr
