"""Whole runs with several actors, of which some are killed."""

import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.conftest import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(1200)]
WAIT_SECONDS = 300.0
ACTOR, ENGINE = "ray::RolloutActor", "VLLM::EngineCore"


@contextmanager
def going(headway, name, *settings):
    """Start the small recipe with two actors, and yield its process and folder."""
    runs, recipe = headway.folder / "runs", headway.folder / "several.toml"
    text = RECIPE.read_text()
    assert 'cores = ["0"]' in text
    recipe.write_text(text.replace('cores = ["0"]', "count = 2\ncpus = 0.5"))
    changes = [part for setting in (f"name={name}", *settings) for part in ("--set", setting)]
    process = headway.start_plain("run", recipe, *changes)
    with process:
        try:
            yield process, runs / name
        finally:
            process.terminate()


def until(happened, process):
    """Wait until `happened` returns something true, and return it; the run has to stay alive."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := happened()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def rows(path):
    """Return the records of a JSON-lines file so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def living(folder, title):
    """Return parent and id of the runs' processes with such a title, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "stat").read_text().rsplit(")", 1)[1].split()
            mine = (path / "cwd").readlink() == folder
            if mine and status[0] != "Z" and (path / "cmdline").read_text().startswith(title):
                found.append((int(status[19]), int(status[1]), int(path.name)))
        except OSError:
            continue
    return [(parent, pid) for _, parent, pid in sorted(found)]


def served(folder, engine, after=0.0):
    """Return the versions that an engine began to serve after a time."""
    return [
        row["version"]
        for row in rows(folder / "swaps.jsonl")
        if row["engine_id"] == engine and not row["error"] and row["swap_finished_at"] > after
    ]


def serves_again(folder, restarts):
    """Return the engine of the newest of `restarts` restarts, once it has new weights."""
    found = rows(folder / "restarts.jsonl")
    if len(found) < restarts:
        return None
    engine = found[-1]["actor"].replace("actor", "engine")
    return engine if served(folder, engine, found[-1]["at"]) else None


def ended(process, headway, name):
    """Wait for a run to end well; returns its summary, accounts and output."""
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, output
    inspected = headway("inspect", name, "--json")
    assert inspected.returncode == 0, inspected.stderr
    summary = json.loads((headway.folder / "runs" / name / "summary.json").read_text())
    return summary, json.loads(inspected.stdout), output


def restarts(**counts):
    """Return what a summary has of restarts, of which all but these are 0."""
    roles = ("actors", "reward_models", "learner", "broker", "broadcaster", "driver")
    return dict.fromkeys(roles, 0) | counts


def check_kills(summary, accounts, steps):
    """Check that two actors were restarted, and that nothing was lost or trained twice."""
    assert summary["restarts"] == restarts(actors=2)
    check_accounts(summary, accounts, steps)


def check_accounts(summary, accounts, steps):
    """Check that a run ended well, and that nothing was lost or trained twice."""
    assert (summary["status"], summary["version"]) == ("done", steps)
    assert summary["rollouts_trained"] == steps * 2 * 2
    assert summary["max_lag_trained"] <= 2
    assert accounts["balanced"]
    assert (accounts["trained"], accounts["trained_twice"]) == (steps * 2, 0)


def test_a_run_whose_actors_are_killed_loses_and_doubles_nothing(headway):
    steps = 100
    with going(
        headway, "killed", f"steps={steps}", f"heldout.every={steps}",
        "learner.checkpoint_every=50",
        "actors.scripted_options={tokens_per_second=20.0}",
    ) as (process, folder):  # fmt: skip
        until(lambda: len(rows(folder / "metrics.jsonl")) >= 3, process)
        (_, first), (_, second) = living(headway.folder, ACTOR)
        os.kill(first, signal.SIGKILL)
        engine = until(lambda: serves_again(folder, 1), process)
        os.kill(second, signal.SIGKILL)
        other = until(lambda: serves_again(folder, 2), process)
        assert {engine, other} == {"engine-0", "engine-1"}
        summary, accounts, output = ended(process, headway, "killed")
    check_kills(summary, accounts, steps)
    assert output.count("is restarted (1 of 5 in a row)") == 2
    assert output.count("is ready again") == 2
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0


def test_an_actor_that_dies_too_often_ends_the_run_with_one_message(headway):
    with going(
        headway, "mortal", "steps=100000", "heldout.every=100000", "deploy.max_restarts=0"
    ) as (process, folder):
        until(lambda: len(rows(folder / "metrics.jsonl")) >= 2, process)
        (_, first), _ = living(headway.folder, ACTOR)
        os.kill(first, signal.SIGKILL)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    words = " ".join(output.split())
    assert "died 1 times in a row, more than deploy.max_restarts = 0 makes up for" in words
    assert words.count("its process died") == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["restarts"] == restarts()
    assert summary["accounting"]["balanced"]


def test_an_error_of_the_users_in_one_actor_ends_the_run_and_restarts_nothing(headway):
    """The reward imports in the driver, which checks it, and in one actor, but not in the other."""
    (headway.folder / "third_time.py").write_text(
        "from pathlib import Path\n"
        "def claim():\n"
        "    for name in ('driver', 'one-actor'):\n"
        "        try:\n"
        "            (Path(__file__).parents[1] / name).touch(exist_ok=False)\n"
        "            return\n"
        "        except FileExistsError:\n"
        "            pass\n"
        "    raise ValueError('a reward that does not import')\n"
        "claim()\n"
        "def score(prompt, completion, answer, metadata):\n"
        "    return 1.0\n"
    )
    settings = ("steps=100000", "heldout.every=100000", "actors.reward=['third_time:score']")
    with going(headway, "third", *settings) as (process, folder):
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2, output
    assert "a reward that does not import" in output
    assert "Traceback" not in output
    assert "is restarted" not in output
    assert not folder.exists(), "bad input leaves nothing behind"


def narrowest_binding(pid):
    """Return the smallest number of cores that a thread of a process is bound to."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return min((os.sched_getaffinity(int(task.name)) for task in tasks), key=len)


@pytest.mark.vllm
@pytest.mark.timeout(500)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines on cores of their own")
@pytest.mark.parametrize("trained", [(), ("learner.lora.rank=4",)], ids=["weights", "adapter"])
def test_an_engine_and_an_actor_of_vllm_that_are_killed_serve_the_newest_weights_again(
    headway, trained
):
    name = "-".join(["real-killed", *trained]).replace("=", "-")
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    with going(
        headway, name, "steps=100000", "heldout.every=100000", "actors.engine=vllm",
        "learner.checkpoint_every=100000", f"actors.cores={cores}", *trained,
    ) as (process, folder):  # fmt: skip
        metrics = folder / "metrics.jsonl"
        until(lambda: len(rows(metrics)) >= 3, process)
        (actor, engine), (other_actor, other_engine) = living(headway.folder, ENGINE)
        first, second = (narrowest_binding(pid) for pid in (engine, other_engine))
        assert first
        assert second
        assert not first & second
        os.kill(engine, signal.SIGKILL)
        restarted = [until(lambda: serves_again(folder, 1), process)]
        assert actor not in [pid for _, pid in living(headway.folder, ACTOR)]
        os.kill(other_actor, signal.SIGKILL)
        trained = len(rows(metrics))
        until(lambda: len(rows(metrics)) >= trained + 10, process)
        assert serves_again(folder, 2) is None, "the run goes on while one actor is away"
        restarted.append(until(lambda: serves_again(folder, 2), process))
        assert sorted(restarted) == ["engine-0", "engine-1"]
        trained = len(rows(metrics))
        until(lambda: len(rows(metrics)) >= trained + 3, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    reasons = [row["reason"] for row in rows(folder / "restarts.jsonl")]
    assert "a process of the vLLM engine is gone" in reasons[0]
    assert "its process died" in reasons[1]
    for row, engine_id in zip(rows(folder / "restarts.jsonl"), restarted, strict=True):
        published = sum(batch["published_at"] < row["at"] for batch in rows(metrics))
        assert served(folder, engine_id, row["at"])[0] >= published
    accounts = json.loads(headway("inspect", name, "--json").stdout)
    assert accounts["balanced"]
    assert accounts["trained_twice"] == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["restarts"] == restarts(actors=2)
    assert summary["max_lag_trained"] <= 2
