"""Whole runs from the command line: what they leave behind, and how they end."""

import json
import shutil
import signal
import sqlite3
import time

import pyarrow.parquet
import pytest

from tests.deploy.processes import open_shared_memory, processes_of

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

WARM = "small-sft"


def share_warm_start(headway, name):
    """The warm start belongs to a run's name; another run of the same recipe takes a copy."""
    target = headway.folder / "runs" / f"{name}-sft"
    if not target.exists():
        shutil.copytree(headway.folder / "runs" / WARM, target)


def accounting(headway, run):
    result = headway("inspect", run, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def finished(headway):
    """One finished run with the scripted engine, and its folder."""
    result = headway.recipe("run")
    assert result.returncode == 0, result.stdout + result.stderr
    return headway.folder / "runs" / "small", result.stdout


def test_a_run_trains_every_step_within_the_bound_and_scores_both_ends(finished):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["version"], summary["optimizer_steps"]) == ("done", 4, 4)
    assert summary["rollouts_trained"] == 4 * 2 * 2
    assert 0 <= summary["max_lag_trained"] <= summary["max_staleness"] == 2
    assert [row["version"] for row in summary["heldout"]] == [0, 2, 4]
    assert [row["size"] for row in summary["heldout_sampled"]] == [6, 4, 6]
    assert summary["heldout"][-1]["sampled_by"] == [4, 4]
    assert sum(summary["lag_histogram"].values()) == summary["tokens_trained"]
    assert summary["accounting"]["balanced"]
    assert summary["weight_sync"]["failed"] == 0


def test_a_run_ends_with_a_table_and_a_picture(finished):
    folder, output = finished
    assert "small: done" in output
    assert "report.html" in output
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_every_batch_is_recorded_in_order_with_its_times(finished):
    folder, _ = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["wait_finished_at"] <= row["step_started_at"] < row["step_finished_at"]
        assert row["step_finished_at"] <= row["published_at"]


def test_checkpoints_are_committed_and_the_newest_one_is_exported(headway, finished):
    folder, _ = finished
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "v000002",
        "v000004",
    ]
    exported = headway("export", "small", "--to", "model")
    assert exported.stdout == "version 4 in model\n", exported.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = headway.folder / "model"
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(target).eos_token == "<eos>"
    assert not (target / "optimizer").exists()
    again = headway("export", "small", "--to", "model")
    assert (again.returncode, again.stderr) == (
        2,
        "headway: model exists; name a folder that does not\n",
    )


def test_accounts_balance_and_every_trained_rollout_is_exported(headway, finished):
    accounts = accounting(headway, "small")
    assert accounts["balanced"]
    assert (accounts["trained"], accounts["trained_twice"]) == (8, 0)
    result = headway("inspect", "small", "--parquet", "rollouts.parquet")
    assert result.returncode == 0, result.stderr
    rows = pyarrow.parquet.read_table(headway.folder / "rollouts.parquet").to_pylist()
    trained = [row for row in rows if row["state"] == "trained"]
    assert len(trained) == 16
    for row in trained:
        sampled = [v for v, mask in zip(row["versions"], row["loss_mask"], strict=True) if mask]
        assert row["trained_version"] - min(sampled) <= 2


def test_a_name_that_exists_is_refused_and_nothing_is_changed(headway, finished):
    folder, _ = finished
    before = (folder / "summary.json").read_bytes()
    result = headway.recipe("run")
    assert result.returncode == 2
    assert "a run named 'small' exists" in result.stderr
    assert "Traceback" not in result.stderr
    assert (folder / "summary.json").read_bytes() == before


def test_training_and_held_out_problems_are_disjoint(finished):
    folder, _ = finished
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT evaluation, prompt FROM groups").fetchall()
    texts = {False: set(), True: set()}
    for evaluation, prompt in rows:
        texts[evaluation is not None].add(json.loads(prompt)["text"])
    assert texts[False]
    assert len(texts[True]) == 6
    assert not texts[False] & texts[True]


def test_synchronous_training_is_the_same_code_with_no_lag(headway):
    share_warm_start(headway, "sync")
    result = headway.recipe(
        "run", "name=sync", "queues.max_staleness=0", "steps=3", "actors.reward=['my_reward:score']"
    )
    assert result.returncode == 2, "the reward does not exist yet"
    (headway.folder / "my_reward.py").write_text(
        "def score(prompt, completion, answer, metadata):\n"
        "    return {'length': len(completion) / 100, 'even': float(len(completion) % 2 == 0)}\n"
    )
    result = headway.recipe(
        "run", "name=sync", "queues.max_staleness=0", "steps=3", "actors.reward=['my_reward:score']"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((headway.folder / "runs" / "sync" / "summary.json").read_text())
    assert summary["lag_histogram"].keys() == {"0"}
    assert headway("inspect", "sync", "--parquet", "sync.parquet").returncode == 0
    rows = pyarrow.parquet.read_table(headway.folder / "sync.parquet").to_pylist()
    assert {name for row in rows for name, _ in row["reward_parts"]} == {
        "my_reward:score/length",
        "my_reward:score/even",
    }


def wait_for_batches(folder, count, process, seconds=300):
    deadline = time.monotonic() + seconds
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no batch was trained in time"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_a_run_that_is_stopped_leaves_readable_accounts_and_no_process_or_shared_memory(
    headway, number, code
):
    name = f"stopped-{number.value}"
    share_warm_start(headway, name)
    process = headway.start("run", f"name={name}", "steps=100000", "heldout.every=100000")
    folder = headway.folder / "runs" / name
    wait_for_batches(folder, 3, process)
    assert open_shared_memory()
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "Traceback" not in output
    deadline = time.monotonic() + 60
    while open_shared_memory() or processes_of(headway.folder):
        assert time.monotonic() < deadline, (open_shared_memory(), processes_of(headway.folder))
        time.sleep(0.2)
    accounts = accounting(headway, name)
    assert accounts["balanced"]
    assert accounts["trained"] >= 3 * 2
    assert accounts["trained_twice"] == 0
    if code == 130:
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        newest = max((folder / "checkpoints").glob("v*"))
        assert newest.name == f"v{summary['version']:06d}"
