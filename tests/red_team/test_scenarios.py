"""Whole runs in circumstances that no other test has; `deploy/docs/failures.md` lists them all."""

import signal

import pytest

from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import report_bias
from tests.deploy.running import ACTOR, BROKER, ENGINE, RANK, Running

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

SLOW = "actors.scripted_options={tokens_per_second=40.0}"
OFTEN = "deploy.max_restarts=20"


def test_late_tokens_are_masked_and_none_is_lost_though_processes_are_killed(headway):
    settings = (
        "steps=40", "queues.on_overdue=mask", "queues.max_staleness=1", "heldout.every=40",
        "actors.max_new_tokens=120", "queues.heartbeat_seconds=0.2", OFTEN,
        "actors.scripted_options={tokens_per_second=60.0, median_length=12, length_sigma=1.3}",
    )  # fmt: skip
    with Running(headway, "masked", *settings) as run:
        run.trains(3)
        for title in (ACTOR, RANK, BROKER):
            run.strike(title, signal.SIGKILL)
        run.check(40, oldest=40, actors=1, learner=1, broker=1)
    assert run.summary["max_lag_trained"] <= 1
    assert sum(row.get("tokens_too_old", 0) for row in run.rows("metrics.jsonl")) > 0
    with open_ledger(run.folder) as database:
        assert report_bias(database).groups["late"] > 0


def test_pinned_scores_are_complete_though_evaluator_and_learner_are_killed(headway):
    """They are of one version, but for the one whose evaluator died: the run says that."""
    settings = (
        "steps=30", "heldout.pinned=true", "heldout.every=10", "heldout.size=24",
        "heldout.final_size=24", "actors.count=2", "actors.cpus=0.0", OFTEN, SLOW,
    )  # fmt: skip
    with Running(headway, "pinned", *settings, cores='cores = ["0", "1"]') as run:
        for batches, title in ((3, f"{ACTOR} actor-1"), (11, RANK), (21, f"{ACTOR} actor-0")):
            run.trains(batches)
            run.strike(title, signal.SIGKILL)
        run.check(30, actors=2, learner=1)
        said = "though heldout.pinned = true: its actor died" in run.output()
    rows = run.summary["heldout"] + run.summary["heldout_sampled"]
    assert {(row["scored"], row["failed"]) for row in rows} == {(24, 0)}
    mixed = [row["version"] for row in rows if row["sampled_by"] != [row["version"]] * 2]
    assert {*mixed} <= {20}
    assert said == bool(mixed)


def test_a_rank_that_is_killed_as_it_writes_a_checkpoint_leaves_a_whole_one(headway):
    settings = ("steps=30", "heldout.every=30", "learner.checkpoint_every=1", OFTEN)
    with Running(headway, "cut-off", *settings) as run:
        run.trains(2)
        checkpoints, kills = run.folder / "checkpoints", 4
        for _ in range(kills):
            run.until(lambda: [p for p in checkpoints.iterdir() if not p.name[1:].isdigit()])
            run.strike(RANK, signal.SIGKILL)
        run.check(30, learner=kills)
    assert {path.name for path in checkpoints.iterdir()} == {"v000029", "v000030"}


@pytest.mark.vllm
def test_two_ranks_and_an_engine_are_killed_in_turn_and_at_once(headway):
    settings = (
        "steps=50", "heldout.every=50", "learner.ranks=2", "actors.engine=vllm", "actors.cpus=0.0",
        OFTEN,
    )  # fmt: skip
    with Running(headway, "ranks", *settings) as run:
        run.trains(2)
        for title in (ENGINE, f"{RANK} learner-1", f"{RANK} learner-0"):
            run.strike(title, signal.SIGKILL)
        run.strike(f"{RANK} learner-1", signal.SIGKILL, ENGINE)
        run.check(50, actors=2, learner=3)
