"""Stalls of a real run, injected one by one; each is reported within its deadline + 10 s."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.processes import processes_of, titled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.deepspeed,
    pytest.mark.timeout(600),
]

DEADLINE = 8.0
MORE = 10.0


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(what, deadline=180):
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if answer := what():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"not within {deadline} s")


class Stalled:
    """A run in a process, ended at the end of the `with` block."""

    def __init__(self, headway, name, *settings, environment=None):
        self.folder = headway.folder / "runs" / name
        self.name = name
        self.headway = headway
        self.arguments = headway.arguments(
            "run",
            f"name={name}",
            "steps=100000",
            "heldout.every=100000",
            f"deploy.watchdog_seconds={DEADLINE}",
            *settings,
        )
        self.environment = {**headway.environment, **(environment or {})}
        self.stopped, self.earlier = [], 0

    def __enter__(self):
        with (self.headway.folder / f"{self.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                self.arguments,
                start_new_session=True,
                cwd=self.headway.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_):
        for each in self.stopped:
            if each.is_running():
                each.resume()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def output(self):
        return (self.headway.folder / f"{self.name}.log").read_text()

    def trains(self, batches=5):
        def trained():
            assert self.process.poll() is None, self.output()
            return len(rows(self.folder / "metrics.jsonl")) >= batches

        wait_for(trained)

    def stop(self, title):
        """Send SIGSTOP to the process of the run with this title and return its id."""
        [found] = wait_for(lambda: titled(self.process.pid, title), 10)
        self.earlier = len(rows(self.folder / "waits.jsonl"))
        self.stopped.append(found)
        found.suspend()
        return found.pid

    def named(self, *on):
        """Return the first record since the stop that waits on one of `on`, which comes in time."""
        began = time.monotonic()

        def found():
            said = rows(self.folder / "waits.jsonl")[self.earlier :]
            return [row for row in said if row["on"] in on]

        [row, *_] = wait_for(found, DEADLINE + MORE)
        print(f"{row['text']}\nnamed after {time.monotonic() - began:.1f} s of {DEADLINE:g}")
        wait_for(lambda: f"waits on {row['on']} for" in self.output(), 10)
        return row


def test_a_rollout_actor_that_is_stopped(headway):
    with Stalled(headway, "stopped-actor") as run:
        run.trains()
        pid = run.stop("ray::RolloutActor")
        row = run.named("actor-0")
        assert f"actor-0: pid {pid} is stopped" in row["text"]


def test_a_learner_that_is_stopped(headway):
    with Stalled(headway, "stopped-learner") as run:
        run.trains()
        pid = run.stop("ray::RankActor")
        row = run.named("learner", "learner-0")  # as it trains a batch, or waits for the next
        assert f"learner-0: pid {pid} is stopped" in row["text"]


def test_one_rank_of_two_that_is_stopped(headway):
    with Stalled(headway, "stopped-rank", "learner.ranks=2", "actors.cpus=0.0") as run:
        run.trains()
        pid = run.stop("ray::RankActor learner-1")
        row = run.named("learner-1")
        assert f"learner-1: pid {pid} is stopped" in row["text"]


def test_a_broker_that_is_stopped(headway):
    with Stalled(headway, "stopped-broker") as run:
        run.trains()
        pid = run.stop("ray::BrokerActor")
        row = run.named("broker")
        assert f"broker: pid {pid} is stopped" in row["text"]


@pytest.mark.vllm
def test_an_engine_of_vllm_that_is_stopped_while_its_actor_answers(headway):
    with Stalled(headway, "hung-engine", "actors.engine=vllm") as run:
        run.trains()
        pid = run.stop("VLLM::EngineCore")
        row = run.named("actor-0")
        assert row["what"].endswith("rollouts to end") or "due group" in row["what"]
        assert f"its child (VLLM::EngineCore) pid {pid} is stopped" in row["text"]


def test_a_reward_that_hangs_is_in_the_stacks(headway):
    hang = headway.folder / "hang"
    (headway.folder / "hanging.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, answer, metadata):\n"
        f"    while os.path.exists({str(hang)!r}):\n"
        "        time.sleep(0.05)\n"
        "    return 1.0\n"
    )
    settings = ("actors.reward=['hanging:score']", "actors.reward_timeout_seconds=600")
    with Stalled(headway, "hanging-reward", *settings) as run:
        run.trains()
        hang.write_text("")
        row = run.named("actor-0")
        hang.unlink()
        assert "score (hanging.py" in (run.folder / row["stacks"]).read_text()


def test_a_disk_that_does_not_come_back(headway, tmp_path):
    source, library = Path(__file__).parents[1] / "slow_disk.c", tmp_path / "slow_disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    slow = tmp_path / "slow"
    environment = {
        "LD_PRELOAD": str(library),
        "SLOW_FOLDER": str(headway.folder / "runs" / "slow-disk" / ""),
        "SLOW_WHILE": str(slow),
    }
    with Stalled(headway, "slow-disk", environment=environment) as run:
        run.trains()
        slow.write_text("")
        said = "waits on the disk of the run's folder for"
        wait_for(lambda: said in run.output(), DEADLINE + MORE)
        slow.unlink()
        run.named("the disk of the run's folder")


def test_a_run_that_is_told_to_ends_with_a_checkpoint_when_an_actor_hangs(headway):
    with Stalled(headway, "aborted", "deploy.watchdog_aborts=true") as run:
        run.trains()
        run.stop("ray::RolloutActor")
        assert run.process.wait(DEADLINE + MORE + 30) == 1
        assert "ended by deploy.watchdog_aborts" in run.output()
    trained = len(rows(run.folder / "metrics.jsonl"))
    assert sorted(run.folder.glob("checkpoints/v*"))[-1].name == f"v{trained:06}"
    assert not processes_of(headway.folder)
