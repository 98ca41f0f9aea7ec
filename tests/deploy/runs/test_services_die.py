"""Whole runs whose broker, broadcaster or learner is killed or stopped: they go on by themselves.

A process that is stopped is found by its silence.
"""

import signal
import time

import pytest

from tests.deploy.running import BROADCASTER, BROKER, RANK, Running

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]

SLOW = "actors.scripted_options={tokens_per_second=40.0}"
CHECKPOINTS = "learner.checkpoint_every=10"
VLLM = ("actors.engine=vllm", "actors.max_new_tokens=160")


def lasts(steps):
    return f"steps={steps}", f"heldout.every={steps}", CHECKPOINTS


@pytest.mark.vllm
def test_a_run_outlives_its_broker_and_its_broadcaster_and_trains_nothing_again(headway):
    with Running(headway, "unserved", *lasts(60), *VLLM) as run:
        run.trains(5)
        for title in (BROKER, BROADCASTER):
            for how in (signal.SIGKILL, signal.SIGSTOP):
                run.strike(title, how)
        assert run.check(60, broker=2, broadcaster=2) == 0, "the learner waits meanwhile"
    for name in ("broker", "broadcaster"):
        assert f"{name} is restarted (1 of 5 in a row)" in run.output()
        assert run.output().count(f"{name} is restarted (") == 2
    assert len(run.query("SELECT key FROM meta WHERE key GLOB 'session_*'")) == 1


def test_rollouts_in_progress_are_put_when_the_broker_is_back(headway):
    settings = (
        "steps=3", "heldout.every=3", "heldout.size=2", "prompts.groups_per_batch=16",
        "queues.max_staleness=1", "actors.max_concurrent_rollouts=80", "actors.max_new_tokens=120",
        "actors.scripted_options={tokens_per_second=6.0, median_length=400.0}",
    )  # fmt: skip
    leased = "SELECT group_id, attempt FROM groups WHERE state = 'leased' AND purpose = 'train'"
    with Running(headway, "in-progress", *settings) as run:
        sampled = f"{leased} AND leased_at < "
        run.until(lambda: len(run.query(sampled + str(time.time() - 2.0))) == 32)
        in_progress = run.query(leased)
        run.first(BROKER).kill()
        killed_at = time.time()
        assert run.check(3, groups=16, broker=1) == 0
    put = run.query(f"SELECT group_id, attempt FROM results WHERE accepted_at > {killed_at}")
    kept = 2 * len({*in_progress} & {*put})
    assert len(in_progress) == 32
    assert kept >= 60


def test_a_run_outlives_its_learner_alone_and_with_broker_or_broadcaster(headway):
    with Running(headway, "unled", *lasts(60), SLOW) as run:
        run.trains(13)
        run.strike(RANK, signal.SIGKILL)
        assert "the learner goes on from version 10" in run.output()
        run.strike(RANK, signal.SIGSTOP)
        run.strike(RANK, signal.SIGKILL, BROADCASTER)
        run.strike(RANK, signal.SIGKILL, BROKER)
        again = run.check(60, learner=4, broker=1, broadcaster=1)
    assert again >= 2, "batches after the checkpoint are trained again"
    assert "learner is restarted (1 of 5 in a row)" in run.output()


def test_a_run_outlives_a_rank_of_its_learner(headway):
    settings = (*lasts(40), SLOW, "learner.ranks=2", "actors.cpus=0.0")
    with Running(headway, "ranks", *settings) as run:
        run.trains(13)
        for how in (signal.SIGKILL, signal.SIGSTOP):
            run.strike(f"{RANK} learner-1", how)
        again = run.check(40, learner=2)
    assert again >= 2, "batches after the checkpoint are trained again"
    assert "the learner goes on from version 10" in run.output()


def test_without_staleness_a_killed_learner_ends_with_the_same_weights(headway):
    settings = (
        *lasts(16), SLOW, "queues.max_staleness=0", "learner.threads=1",
        "learner.learning_rate=1e-2", "learner.checkpoint_every=4",
        'actors.reward=["varied:score"]',
    )  # fmt: skip
    with Running(headway, "untouched", *settings) as untouched:
        untouched.ends()
    with Running(headway, "touched", *settings) as run:
        for batches in (2, 10):  # before the first checkpoint, and after two
            run.trains(batches)
            run.strike(RANK, signal.SIGKILL)
        assert run.check(16, learner=2) >= 2
    weights = [row["weights_checksum"] for row in untouched.rows("metrics.jsonl")]
    assert len(set(weights)) == 16, "every batch teaches something"
    assert [row["weights_checksum"] for row in run.rows("metrics.jsonl")] == weights
