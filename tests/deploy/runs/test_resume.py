"""Runs that are stopped at any moment, and go on."""

import json
import os
import random
import shutil
import signal
import time

import pyarrow.parquet
import pytest

from queues.readers.accounting import open_ledger
from queues.schema import decode
from tests.deploy.processes import open_shared_memory, processes_of

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

STEPS = 60
LONG = (f"steps={STEPS}", "heldout.every=30", "learner.checkpoint_every=7")


def warm(headway, name):
    target = headway.folder / "runs" / f"{name}-sft"
    if not target.exists():
        shutil.copytree(headway.folder / "runs" / "small-sft", target)


def begin(headway, name, *settings):
    """Starts a run, or goes on with it; as a terminal does, in a process group of its own."""
    if (headway.folder / "runs" / name / "recipe.json").exists():
        return headway.start_plain("resume", name)
    warm(headway, name)
    return headway.start("run", f"name={name}", *LONG, *settings)


def wait_for_batches(folder, count, process, seconds=300):
    deadline = time.monotonic() + seconds
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no batch was trained in time"
        time.sleep(0.05)


def check_finished(headway, name, steps=STEPS):
    """Every batch trained once, in order, by the weights of the batch before it."""
    folder = headway.folder / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", steps)
    assert summary["rollouts_trained"] == steps * 2 * 2
    assert [row["version"] for row in summary["heldout"]] == [0, *range(30, steps, 30), steps]
    state = json.loads((folder / "checkpoints" / f"v{steps:06d}" / "state.json").read_text())
    assert (state["optimizer_steps"], state["totals"]["rollouts"]) == (steps, steps * 2 * 2)
    assert summary["max_lag_trained"] <= 2
    accounts = json.loads(headway("inspect", name, "--json").stdout)
    assert accounts["balanced"]
    assert (accounts["trained"], accounts["trained_twice"]) == (steps * 2, 0)
    assert accounts["issued"] == accounts["trained"] == summary["accounting"]["trained"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == list(range(steps))
    return summary


def test_an_interrupted_run_goes_on_from_its_checkpoint_to_its_end(headway):
    process = begin(headway, "paused")
    folder = headway.folder / "runs" / "paused"
    wait_for_batches(folder, 3, process)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert (process.returncode, "Traceback" in output) == (130, False), output
    assert time.monotonic() - began < 20
    assert "go on with: headway resume" in output
    before = json.loads((folder / "summary.json").read_text())
    assert before["status"] == "interrupted"
    assert (folder / "checkpoints" / f"v{before['version']:06d}").is_dir()

    resumed = headway("resume", "paused")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = check_finished(headway, "paused")
    assert after["seconds"] > before["seconds"]
    assert after["tokens_generated"] > before["tokens_generated"]
    assert after["seconds_to_first_step"] == before["seconds_to_first_step"]

    again = headway("resume", "paused")
    assert (again.returncode, "is done" in again.stdout) == (0, True)


def test_rollouts_that_an_interrupt_cuts_off_are_gone_on_with_and_keep_their_tokens(headway):
    settings = ("steps=20", "heldout.every=20", "actors.scripted_options={tokens_per_second=12.0}")
    process = begin(headway, "cut", *settings)
    folder = headway.folder / "runs" / "cut"
    wait_for_batches(folder, 2, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    with open_ledger(folder) as ledger:
        saved = dict(ledger.execute("SELECT group_id, payload FROM partials").fetchall())
    assert saved, "rollouts of two seconds were running"
    begun = {
        (group_id, rollout.sample_index): rollout
        for group_id, payload in saved.items()
        for rollout in decode(payload).rollouts
    }
    resumed = headway("resume", "cut")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    exported = headway("inspect", "cut", "--parquet", "cut.parquet")
    assert exported.returncode == 0, exported.stderr
    rows = pyarrow.parquet.read_table(headway.folder / "cut.parquet").to_pylist()
    ended = {(row["group_id"], row["sample_index"]): row for row in rows}
    gone_on = [
        key
        for key, rollout in begun.items()
        if key in ended and ended[key]["created_at"] == rollout.created_at
    ]
    assert gone_on
    for key in gone_on:
        count = len(begun[key].token_ids)
        for name in ("token_ids", "versions", "behavior_logprobs"):
            assert ended[key][name][:count] == list(getattr(begun[key], name)), key
        assert len(ended[key]["token_ids"]) >= count
    with open_ledger(folder) as ledger:
        assert ledger.execute("SELECT count(*) FROM partials").fetchone()[0] == 0


def test_a_run_whose_processes_were_all_killed_trains_its_recorded_batches_again(headway):
    process = begin(headway, "sudden", "learner.checkpoint_every=10")
    folder = headway.folder / "runs" / "sudden"
    wait_for_batches(folder, 15, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=180)
    deadline = time.monotonic() + 180
    while processes_of(headway.folder):
        assert time.monotonic() < deadline, processes_of(headway.folder)
        time.sleep(0.1)
    trained = json.loads(headway("inspect", "sudden", "--json").stdout)["trained"]
    assert trained >= 15 * 2

    resumed = headway("resume", "sudden")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    check_finished(headway, "sudden")


@pytest.mark.slow
def test_a_run_that_is_going_on_or_does_not_exist_is_not_resumed(headway):
    missing = headway("resume", "nowhere")
    assert missing.returncode == 2
    assert "no run 'nowhere'" in missing.stderr
    process = begin(headway, "busy", "steps=100000")
    wait_for_batches(headway.folder / "runs" / "busy", 1, process)
    refused = headway("resume", "busy")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert refused.returncode == 2
    assert "is going on" in refused.stderr


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3000)
def test_twenty_interrupts_at_random_moments_are_clean_and_lose_nothing(headway):
    moments = random.Random(2026)
    memory = set(os.listdir("/dev/shm"))
    for number in range(20):
        process = begin(headway, "twenty", "actors.engine=vllm", "steps=990")
        time.sleep(moments.uniform(0.3, 45.0))
        assert process.poll() is None, process.stdout.read()
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=180)
        assert (process.returncode, "Traceback" in output) == (130, False), (number, output)
        assert time.monotonic() - began < 20, (number, output)
        deadline = time.monotonic() + 2
        while open_shared_memory() or processes_of(headway.folder):
            assert time.monotonic() < deadline, (number, processes_of(headway.folder))
            time.sleep(0.1)
        assert set(os.listdir("/dev/shm")) <= memory, number
    resumed = headway("resume", "twenty", timeout=900)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    check_finished(headway, "twenty", steps=990)
