"""Runs that are stopped at any moment, and resumed."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from unittest import mock

import pytest

from deploy.api import training_run
from deploy.cluster.cleanup import SHARED_MEMORY
from queues.readers.open_run import open_ledger
from queues.schema import decode
from tests.deploy.conftest import RECIPE, FinishedRun
from tests.deploy.processes import leaked_shared_memory, open_shared_memory, wait_for_end
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed]


@contextlib.contextmanager
def working_in(headway):
    """Run the block where the commands run, for `import headway`."""
    with contextlib.chdir(headway.folder), mock.patch.dict(os.environ, headway.environment):
        yield


def interrupt(process):
    """Send Ctrl-C to the whole process group, as a terminal does, and return the output."""
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert (process.returncode, "Traceback" in output) == (130, False), output
    assert time.monotonic() - began < 20
    return output


def resume(headway, name, *settings, timeout=600):
    options = [part for setting in settings for part in ("--set", setting)]
    result = headway("resume", name, *options, timeout=timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    return FinishedRun(headway.run_folder(name), result.stdout)


def check_finished(headway, run, *, steps, heldout):
    """Check that every batch was trained once, in order, by the weights of the batch before it."""
    name, summary = run.folder.name, run.summary
    assert (summary["status"], summary["version"]) == ("done", steps)
    assert summary["rollouts_trained"] == steps * 2 * 2
    scored = [row["version"] for row in summary["heldout"]]
    assert scored == [0, *range(heldout, steps, heldout), steps]
    state = json.loads((run.folder / "checkpoints" / f"v{steps:06d}" / "state.json").read_text())
    assert (state["optimizer_steps"], state["totals"]["rollouts"]) == (steps, steps * 2 * 2)
    assert summary["max_lag_trained"] <= 2
    accounts = headway.accounting(name)
    assert accounts["balanced"]
    assert (accounts["trained"], accounts["trained_twice"]) == (steps * 2, 0)
    assert accounts["issued"] == accounts["trained"] == summary["accounting"]["trained"]
    assert [row["version"] for row in run.rows("metrics.jsonl")] == list(range(steps))


@pytest.fixture(scope="module")
def interrupted(headway):
    """Return output and folder of a run from Python, stopped while rollouts of a second ran."""
    settings = {
        "name": "paused", "steps": 12, "heldout.every": 6, "learner.checkpoint_every": 7,
        "deploy.checkpoint_dir": "elsewhere",
        "actors.scripted_options": {"tokens_per_second": 24.0},
    }  # fmt: skip

    async def follow():
        run = training_run.run(RECIPE, settings)
        next(batch for batch in run.metrics() if batch["version"] == 2)
        assert open_shared_memory(headway.folder)
        began = time.monotonic()
        run.stop()
        summary = run.wait(timeout=180)
        assert time.monotonic() - began < 20
        assert (run.status, summary["status"]) == ("interrupted", "interrupted")
        assert run.table()["version"].to_pylist() == list(range(summary["version"]))
        return "\n".join(run.lines())

    with working_in(headway):
        output = asyncio.run(follow())  # in an event loop, as in a notebook
    assert "Traceback" not in output
    wait_for_end(headway, seconds=20)
    run = FinishedRun(headway.run_folder("paused"), output)
    with open_ledger(run.folder) as ledger:
        saved = ledger.execute("SELECT group_id, payload FROM partials").fetchall()
    return run, run.summary, headway.accounting("paused"), saved


@pytest.fixture(scope="module")
def resumed(headway, interrupted):
    """Make the same run longer in its recipe, resume it from Python, and return it at its end."""
    recipe = headway.run_folder("paused") / "recipe.toml"
    text = recipe.read_text()
    assert text.count("steps = 12\n") == 1
    recipe.write_text(text.replace("steps = 12\n", "steps = 13\n"))
    with working_in(headway):
        run = training_run.resume("paused")
    assert run.wait(timeout=600)["status"] == "done"
    return FinishedRun(run.folder, "\n".join(run.lines()))


def test_an_interrupted_run_leaves_a_checkpoint_and_balanced_accounts(interrupted):
    run, summary, accounts, _ = interrupted
    assert "go on with: headway resume" in run.output
    assert summary["status"] == "interrupted"
    newest = max((run.folder / "checkpoints").resolve().glob("v*"))
    assert newest.parent.parent.name == "elsewhere"
    assert newest.name == f"v{summary['version']:06d}"
    assert accounts["balanced"]
    assert accounts["trained"] >= 3 * 2
    assert accounts["trained_twice"] == 0


def test_an_interrupted_run_goes_on_from_its_checkpoint_to_its_end(headway, interrupted, resumed):
    assert "steps: 12 → 13" in resumed.output
    check_finished(headway, resumed, steps=13, heldout=6)
    _, before, _, _ = interrupted
    after = resumed.summary
    assert after["seconds"] > before["seconds"]
    assert after["tokens_generated"] > before["tokens_generated"]
    assert after["seconds_to_first_step"] == before["seconds_to_first_step"]


def test_rollouts_that_an_interrupt_cuts_off_are_continued_and_keep_their_tokens(
    headway, interrupted, resumed
):
    _, _, _, saved = interrupted
    assert saved, "rollouts of a second were running"
    partial = {
        (group_id, rollout.sample_index): rollout
        for group_id, payload in saved
        for rollout in decode(payload).rollouts
    }
    rows = {(row["group_id"], row["sample_index"]): row for row in headway.rollouts("paused")}
    continued = [
        key
        for key, rollout in partial.items()
        if key in rows and rows[key]["created_at"] == rollout.created_at
    ]
    assert continued
    for key in continued:
        count = len(partial[key].token_ids)
        for name in ("token_ids", "versions", "behavior_logprobs"):
            assert rows[key][name][:count] == list(getattr(partial[key], name)), key
        assert len(rows[key]["token_ids"]) >= count
    with open_ledger(resumed.folder) as ledger:
        assert ledger.execute("SELECT count(*) FROM partials").fetchone()[0] == 0


def test_a_finished_run_goes_on_with_more_steps_and_another_learning_rate(headway, copied_run):
    folder = headway.folder / "weights-8"
    run = resume(
        headway, "copied", "steps=8", "learner.learning_rate=0.002", "learner.zero_stage=2",
        f"weight_sync.folder={folder}",
    )  # fmt: skip
    assert "copied goes on with other settings than before" in run.output
    assert "steps: 6 → 8" in run.output
    check_finished(headway, run, steps=8, heldout=2)
    first, second = run.rows("sessions.jsonl")
    assert (first["version"], first["recipe"]["steps"]) == (0, 6)
    assert (second["version"], second["recipe"]["steps"]) == (6, 8)
    assert [change.partition(":")[0] for change in second["changes"]] == [
        "learner.learning_rate", "learner.zero_stage", "name", "steps", "weight_sync.folder",
    ]  # fmt: skip
    rates = [row["learning_rate"] for row in run.rows("metrics.jsonl")]
    assert len({*rates[:6], 0.002}) == 2
    assert rates[6:] == [0.002, 0.002]
    inspected = headway.call("inspect", "copied").stdout
    assert "from version 6 on: steps: 6 → 8" in inspected
    again = headway.call("resume", "copied")
    assert (again.returncode, "8 of 8 steps" in again.stdout) == (0, True)


def test_a_run_whose_processes_were_all_killed_trains_its_recorded_batches_again(headway):
    """They are trained with the learning rate that they had, and only new ones with another."""
    process = headway.start(
        "run", "name=sudden", "steps=14", "heldout.every=7", "learner.checkpoint_every=5"
    )
    headway.wait_for_batches("sudden", 8, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=180)
    wait_for_end(headway, seconds=180)
    trained = headway.accounting("sudden")["trained"] // 2
    assert trained >= 8
    run = resume(headway, "sudden", "learner.learning_rate=0.002")
    check_finished(headway, run, steps=14, heldout=7)
    rates = [row["learning_rate"] for row in run.rows("metrics.jsonl")]
    assert [rate == 0.002 for rate in rates] == [version >= trained for version in range(14)]
    replayed = headway("replay", "sudden", "--steps", f"5:{min(trained + 2, 14)}")
    assert replayed.returncode == 0, replayed.stdout


@pytest.mark.vllm
@pytest.mark.timeout(3000)
def test_twenty_interrupts_at_random_moments_are_clean_and_lose_nothing(headway):
    moments = random.Random(2026)
    memory = {*SHARED_MEMORY.iterdir()}
    settings = ("actors.engine=vllm", "steps=990", "heldout.every=30", "learner.checkpoint_every=7")
    for _ in range(20):
        if (headway.run_folder("twenty") / "recipe.toml").exists():
            process = headway.start_plain("resume", "twenty")
        else:
            process = headway.start("run", "name=twenty", *settings)
        time.sleep(moments.uniform(0.3, 45.0))
        assert process.poll() is None, process.stdout.read()
        interrupt(process)
        wait_for_end(headway, seconds=2)
        until(lambda: not leaked_shared_memory(memory), 2)  # a new file may not be mapped yet
    run = resume(headway, "twenty", timeout=900)
    check_finished(headway, run, steps=990, heldout=30)
