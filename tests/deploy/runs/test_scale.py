"""Whole runs whose number of actors changes while they train."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from queues.schema import summarize
from tests.deploy.conftest import HEADWAY, RECIPE, read_rows
from tests.deploy.runs.test_actors_die import (
    ACTOR,
    going,
    living,
    restarts,
    rows,
    served,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(1200)]


def trains(process, folder, batches):
    """Wait until so many more batches are trained."""
    due = len(rows(folder / "metrics.jsonl")) + batches
    until(lambda: len(rows(folder / "metrics.jsonl")) >= due, process)


def scale(headway, name, actors):
    """Ask a run for a number of actors; return exit code and what was printed, in one line."""
    done = headway("scale", name, "--actors", str(actors))
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def interrupt(process):
    """Stop a run as Ctrl-C does; return what it printed."""
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    return output


def test_a_run_grows_and_shrinks_and_a_resume_keeps_its_size(headway):
    with going(
        headway, "scaled", "actors.count=1", "actors.cpus=0.25", "steps=100000",
        "heldout.every=100000", "actors.scripted_options={tokens_per_second=20.0}",
    ) as (process, folder):  # fmt: skip
        trains(process, folder, 3)
        assert scale(headway, "scaled", 3)[0] == 0
        until(lambda: served(folder, "engine-1") and served(folder, "engine-2"), process)
        trains(process, folder, 3)
        code, words = scale(headway, "scaled", 100)
        assert code == 2
        assert "scaled keeps 3 actor(s): actors: 100 process(es), each with 0.25 CPU" in words
        [(_, oldest), *_] = living(headway.folder, ACTOR)
        assert scale(headway, "scaled", 1)[0] == 0
        until(lambda: len(living(headway.folder, ACTOR)) == 1, process)
        assert [pid for _, pid in living(headway.folder, ACTOR)] == [oldest], "the newest leave"
        trains(process, folder, 3)
        assert scale(headway, "scaled", 2)[0] == 0
        until(lambda: len(served(folder, "engine-1")) > 1, process)
        interrupt(process)
    asked = [(row["before"], row["asked"], bool(row["refused"])) for row in
             read_rows(folder / "scalings.jsonl")]  # fmt: skip
    assert asked == [(1, 3, False), (3, 100, True), (3, 1, False), (1, 2, False)]
    with headway.start_plain("resume", "scaled") as resumed:
        trains(resumed, folder, 3)
        assert len(living(headway.folder, ACTOR)) == 2
        output = interrupt(resumed)
    assert "the learner and 2 actor(s) load" in output
    assert "actors.count: 1 → 2" in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["restarts"] == restarts()
    assert summary["max_lag_trained"] <= 2
    accounts = headway.accounting("scaled")
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert accounts["trained"] == 2 * len(rows(folder / "metrics.jsonl"))
    code, words = scale(headway, "scaled", 2)
    assert (code, "go on with `headway resume" in words) == (2, True)


def test_actors_follow_the_nodes_of_a_cluster(headway):
    """Nodes join, one gets SIGTERM, one is killed; the run goes on with what is there."""
    recipe = headway.folder / "elastic.toml"
    recipe.write_text(RECIPE.read_text().replace('cores = ["0"]', "max_count = 3"))
    settings = (
        "name=elastic", "steps=100000", "heldout.every=100000",
        "actors.scripted_options={tokens_per_second=20.0}",
        "weight_sync.transport=object_store", "queues.lease_seconds=10.0",
        "queues.heartbeat_seconds=1.0",
        'deploy.placement.actors={labels={pool="generate"}}',
    )  # fmt: skip
    changes = [part for setting in settings for part in ("--set", setting)]
    folder, program = headway.run_folder("elastic"), Path(__file__).parents[1] / "elastic_nodes.py"
    done = subprocess.run(
        [sys.executable, program, folder, HEADWAY, "run", recipe, *changes],
        cwd=headway.folder,
        env=headway.environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["code"] == 130, result["said"]
    assert len(result["steps"]) == 5
    assert "leaves its node, which is lost or drained" in result["said"]
    accounts = headway.accounting("elastic")
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert accounts["trained"] == 2 * len(rows(folder / "metrics.jsonl"))


def tokens_kept(folder):
    """Return the tokens that the ledger has: of accepted results, and of unfinished groups."""
    with sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True) as database:
        [accepted] = database.execute("SELECT SUM(tokens) FROM results").fetchone()
        saved = database.execute("SELECT payload FROM partials").fetchall()
    return accepted + sum(summarize(payload).tokens for (payload,) in saved)


@pytest.mark.vllm
def test_vllm_engines_that_leave_hand_over_every_token(headway):
    """A run with one engine, three, and one again; prints its throughput each time."""
    rates = []

    def measure(engines):
        trains(process, folder, 2)
        trains(process, folder, 20)
        first, *_, last = rows(folder / "metrics.jsonl")[-20:]
        samples = sum(row["rollouts_trained"] for row in rows(folder / "metrics.jsonl")[-19:])
        rate = samples / (last["step_finished_at"] - first["step_finished_at"])
        rates.append(f"{engines} engine(s): {rate:.1f} samples/s")

    with going(
        headway, "scaled-vllm", "actors.count=1", "actors.cpus=0.25", "steps=100000",
        "heldout.every=100000", "actors.engine=vllm", "actors.max_new_tokens=200",
        "actors.kv_cache_gib=0.25", "prompts.groups_per_batch=4", "learner.microbatch_tokens=512",
        "learner.checkpoint_every=100",
    ) as (process, folder):  # fmt: skip
        measure(1)
        assert scale(headway, "scaled-vllm", 3)[0] == 0
        until(lambda: served(folder, "engine-1") and served(folder, "engine-2"), process)
        measure(3)
        assert scale(headway, "scaled-vllm", 1)[0] == 0
        until(lambda: len(living(headway.folder, ACTOR)) == 1, process)
        measure(1)
        interrupt(process)
    summary = json.loads((folder / "summary.json").read_text())
    accounts = headway.accounting("scaled-vllm")
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert summary["max_lag_trained"] <= 2
    assert summary["restarts"] == restarts()
    again = [row for row in headway.rollouts("scaled-vllm") if row["attempt"] > 1]
    print(*rates, f"{len(again)} rollouts of groups that were handed over, "
          f"{summary['tokens_generated']} tokens sampled", sep="\n")  # fmt: skip
    assert tokens_kept(folder) == summary["tokens_generated"]
