"""Whole runs whose broker is killed or stopped: they go on by themselves, and so do rollouts."""

import contextlib
import signal
import sqlite3
import time

import pytest

from tests.deploy.processes import titled
from tests.deploy.runs.test_learner_dies import RANK, Going

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]

BROKER = "ray::BrokerActor"


def rows(folder, query):
    """Return what a query of the ledger finds; nothing before the ledger has tables."""
    with contextlib.suppress(sqlite3.OperationalError):
        database = sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)
        with contextlib.closing(database):
            return database.execute(query).fetchall()
    return []


@pytest.mark.vllm
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_run_outlives_its_broker(headway, how):
    settings = ("actors.engine=vllm", "actors.scripted_options={}", "actors.max_new_tokens=160")
    name = f"broker-{how.name.lower()}"
    with Going(headway, name, "steps=60", "heldout.every=60", *settings) as going:
        going.trains(5)
        going.strike(BROKER, how)
        run, again = going.check(60, broker=1)
    assert again == 0, "the learner waits, and trains nothing again"
    assert "broker is restarted (1 of 5 in a row)" in run.output
    assert len(rows(run.folder, "SELECT key FROM meta WHERE key GLOB 'session_*'")) == 1


def test_rollouts_in_progress_are_put_when_the_broker_is_back(headway):
    settings = (
        "steps=3", "heldout.every=3", "heldout.size=2", "prompts.groups_per_batch=16",
        "queues.max_staleness=1", "actors.max_concurrent_rollouts=80", "actors.max_new_tokens=120",
        "actors.scripted_options={tokens_per_second=6.0, median_length=400.0}",
    )  # fmt: skip
    leased = "SELECT group_id, attempt FROM groups WHERE state = 'leased' AND purpose = 'train'"
    with Going(headway, "in-progress", *settings) as going:
        going.until(lambda: len(rows(going.folder, leased)) == 32)
        time.sleep(2.0)
        in_progress = rows(going.folder, leased)
        [broker] = titled(going.process.pid, BROKER)
        broker.send_signal(signal.SIGKILL)
        killed_at = time.time()
        run, again = going.check(3, groups=16, broker=1)
    put = rows(run.folder, f"SELECT group_id, attempt FROM results WHERE accepted_at > {killed_at}")
    kept = 2 * len({*in_progress} & {*put})
    print(f"{2 * len(in_progress)} rollouts in progress, {kept} put after the broker was back")
    assert len(in_progress) == 32
    assert kept >= 60
    assert again == 0


def test_a_run_outlives_broker_and_learner_at_once(headway):
    with Going(headway, "broker-and-learner", "steps=40", "heldout.every=40") as going:
        going.trains(13)
        [broker] = going.until(lambda: titled(going.process.pid, BROKER))
        broker.send_signal(signal.SIGKILL)
        going.strike(f"{RANK} learner-0", signal.SIGKILL)
        going.check(40, broker=1, learner=1)
