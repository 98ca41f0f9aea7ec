"""A whole run on real parts: vLLM generates while DeepSpeed trains."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.conftest import HEADWAY, FinishedRun
from tests.deploy.html_tree import read_page
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.vllm]


@pytest.fixture(scope="module")
def run(headway):
    """Summary, rollouts and weight updates of a run whose engine generates during every update.

    It has a few rollouts at a time, of many in a batch, so that it takes longer than the learner.
    While the engine starts, Ray is looked at as the run says.
    """
    lengths = ("steps=8", "heldout.every=8", "actors.max_new_tokens=160")
    pace = ("prompts.groups_per_batch=6", "actors.max_concurrent_rollouts=2")
    probe = "weight_sync.probe=always"
    process = headway.start("run", "name=real", "actors.engine=vllm", *lengths, *pace, probe)
    line = next(line for line in process.stdout if "ray status" in line).rstrip()
    assert re.search(r"RAY_AUTH_MODE=token \w+=0 ray status --address 127[.\d]+:\d+$", line)
    until(lambda: "Total Usage" in ray_status(line.partition(": ")[2]))  # after some seconds
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    done = FinishedRun(headway.run_folder("real"), output)
    return done.summary, headway.rollouts("real"), done.rows("swaps.jsonl"), done


def ray_status(command):
    environment = {**os.environ, "PATH": f"{HEADWAY.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def sampled_versions(row):
    return [v for v, mask in zip(row["versions"], row["loss_mask"], strict=True) if mask]


def test_no_trained_token_is_older_than_the_bound(run):
    summary, rows, *_ = run
    trained = [row for row in rows if row["state"] == "trained"]
    assert len(trained) == summary["rollouts_trained"] == 8 * 6 * 2
    lags = [row["trained_version"] - v for row in trained for v in sampled_versions(row)]
    assert min(lags) >= 0
    assert max(lags) == summary["max_lag_trained"] <= 2


def test_rollouts_cross_updates_and_their_versions_never_go_backwards(run):
    summary, rows, *_ = run
    spans = [sampled_versions(row) for row in rows]
    assert all(versions == sorted(versions) for versions in spans)
    crossed = sum(len(set(versions)) > 1 for versions in spans)
    assert crossed >= summary["multi_version_rollouts"] > 0


def test_engine_and_learner_agree_on_rollouts_of_the_version_being_trained(run):
    fresh = run[0]["mismatch"]["fresh"]
    assert fresh["tokens"] > 0
    assert fresh["mean_abs_logprob_difference"] < 1e-3


def test_the_page_of_a_rollout_has_the_learners_log_probabilities(headway, run):
    first = next(row for row in run[1] if {*sampled_versions(row)} == {0})
    wanted = f"{first['group_id']}/{first['sample_index']}"
    drawn = headway.call("rollouts", "real", "--open", wanted)
    assert drawn.returncode == 0, drawn.stderr
    page = read_page(Path(drawn.stdout.strip()).read_text())
    rows = page.all(id="tokens")[0].rows()[1:]
    assert len(rows) == sum(first["loss_mask"])
    gaps = [abs(float(row[-1])) for row in rows]
    print(f"gaps at most {max(gaps):.2g}, of {len(gaps)} tokens")
    assert max(gaps) < 1e-3


def test_every_update_succeeds_and_reaches_the_engine_in_order(run):
    summary, _, swaps, _ = run
    assert summary["weight_sync"]["failed"] == 0
    versions = [swap["version"] for swap in swaps]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, 8)
    assert summary["heldout"][-1]["sampled_by"] == [8, 8]


def test_every_version_that_the_engine_served_is_probed_and_has_the_scores_of_the_learner(run):
    done = run[3]
    rows = done.rows("probes.jsonl")
    print([(row["version"], row["difference"], row["tolerance"]) for row in rows])
    assert {row["engine_id"] for row in rows} == {"engine-0"}
    versions = [row["version"] for row in rows]
    assert versions[0] == 0
    assert len(versions) > 4
    assert all(row["difference"] <= row["tolerance"] <= 1e-4 for row in rows)
    assert all(row["difference"] < 1e-5 for row in rows)
    assert done.rows("drift.jsonl") == []
