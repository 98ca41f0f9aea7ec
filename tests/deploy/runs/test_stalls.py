"""Stalls of a real run, injected one by one; each is reported within its deadline + 10 s."""

import contextlib
import time

import pytest

from tests.deploy.processes import processes_of
from tests.deploy.running import ACTOR, BROKER, ENDLESS, ENGINE, RANK, Running

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

DEADLINE, MORE = 8.0, 10.0
WATCHED = (*ENDLESS, f"deploy.watchdog_seconds={DEADLINE}")


@contextlib.contextmanager
def stopped(process):
    """Stop a process by SIGSTOP for the time of a block."""
    process.suspend()
    try:
        yield
    finally:
        if process.is_running():
            process.resume()


def named(run, *on, earlier=0):
    """Return the first record that waits on one of `on` after `earlier` ones; it comes in time."""
    began = time.monotonic()

    def waits():
        return [row for row in run.rows("waits.jsonl")[earlier:] if row["on"] in on]

    row = run.until(waits, DEADLINE + MORE)[0]
    print(f"{row['text']}\nnamed after {time.monotonic() - began:.1f} s of {DEADLINE:g}")
    run.until(lambda: f"waits on {row['on']} for" in run.output(), 10)
    return row


@pytest.mark.vllm
def test_a_process_that_is_stopped_is_named(headway):
    """Each in turn, and the run goes on where it was: actor, engine, broker and either rank."""
    settings = (*WATCHED, "actors.engine=vllm", "learner.ranks=2", "actors.cpus=0.0")
    with Running(headway, "stopped", *settings) as run:
        for title, on, of in (
            (ACTOR, ["actor-0"], "actor-0: "),
            (ENGINE, ["actor-0", "weight update"], "its child (VLLM::EngineCore) "),
            (BROKER, ["broker"], "broker: "),
            (f"{RANK} learner-0", ["learner", "learner-0"], "learner-0: "),
            (f"{RANK} learner-1", ["learner-1"], "learner-1: "),
        ):
            run.trains_more(5)
            process, earlier = run.first(title), len(run.rows("waits.jsonl"))
            with stopped(process):
                row = named(run, *on, earlier=earlier)
            assert f"{of}pid {process.pid} is stopped" in row["text"]
            if row["on"] == "weight update":  # the engine was stopped while its actor updated it
                assert row["who"] == "actor-0"
                assert row["what"].startswith("a version above")
            elif title == ENGINE:
                assert row["what"].endswith("rollouts to end") or "due group" in row["what"]


def test_a_run_that_is_told_to_ends_with_a_checkpoint_when_an_actor_hangs(headway):
    with Running(headway, "aborted", *WATCHED, "deploy.watchdog_aborts=true") as run:
        run.trains(5)
        with stopped(run.first(ACTOR)):
            assert run.process.wait(DEADLINE + MORE + 30) == 1
        assert "ended by deploy.watchdog_aborts" in run.output()
    trained = len(run.rows("metrics.jsonl"))
    assert sorted(run.folder.glob("checkpoints/v*"))[-1].name == f"v{trained:06}"
    assert not processes_of(headway.folder)
