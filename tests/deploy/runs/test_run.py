"""Whole runs from the command line: what they leave behind, and how they end."""

import importlib.metadata
import os

import pytest

from deploy.api.training_run import results
from deploy.observability.samples import heading, text_of
from deploy.offline.rollouts import read_samples
from deploy.storage.run_directory import RunDirectory
from tests.behaviour import paths, recorded
from tests.deploy.conftest import KEPT_FILES

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]


def test_a_run_trains_every_step_within_the_bound_and_scores_both_ends(finished):
    summary = finished.summary
    assert (summary["status"], summary["version"], summary["optimizer_steps"]) == ("done", 6, 6)
    assert summary["rollouts_trained"] == 6 * 2 * 2
    assert 0 <= summary["max_lag_trained"] <= summary["max_staleness"] == 2
    assert [row["version"] for row in summary["heldout"]] == [0, 2, 4, 6]
    assert [row["size"] for row in summary["heldout_sampled"]] == [6, 4, 4, 6]
    assert summary["heldout"][-1]["sampled_by"] == [6, 6]
    assert sum(summary["lag_histogram"].values()) == summary["tokens_trained"]
    assert summary["accounting"]["balanced"]
    assert summary["weight_sync"]["failed"] == 0


def test_a_run_prints_its_table_and_report_and_neither_lines_of_ray_nor_codes_of_a_terminal(
    finished,
):
    assert "small: done" in finished.output
    assert "report.html" in finished.output
    assert (finished.folder / "report.html").read_text().startswith("<!doctype html>")
    assert "(raylet)" not in finished.output
    assert "\x1b" not in finished.output


ABSENT = {"checksum", *(f"heldout_sampled[].{k}" for k in ("samples", "pass_at_k", "incomplete"))}
"""Keys of summary.json that reading takes off, or that several samples of a problem add."""


@pytest.mark.parametrize(("document", "absent"), [("summary", ABSENT), ("inspect", set())])
def test_documents_of_a_run_have_every_recorded_key(headway, finished, document, absent):
    documents = {"summary": finished.summary, "inspect": headway.accounting("small")}
    assert set(recorded(f"{document}_keys.json")) - set(paths(documents[document])) == absent


def test_a_finished_run_is_read_from_python(finished):
    read = results("small", finished.folder.parent)
    assert (read.status, read.summary) == ("done", finished.summary)
    assert read.rows() == finished.rows("metrics.jsonl")
    assert read.table()["version"].to_pylist() == list(range(6))
    assert repr(read) == "<RunResults small: done>"


def test_top_shows_the_figures_of_a_run_that_has_ended(headway, finished):
    result = headway.call("top", "small")
    assert result.returncode == 0, result.stderr
    assert "small: done" in result.stdout
    assert "6 of 6" in result.stdout


def test_every_batch_is_recorded_in_order_with_times_learning_rate_and_parts_of_the_reward(
    finished,
):
    rows = finished.rows("metrics.jsonl")
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for row in rows:
        assert row["learning_rate"] == 1e-6
        assert row["reward_parts"] == {"varied:score": pytest.approx(row["reward_mean"])}
        assert row["wait_finished_at"] <= row["step_started_at"] < row["step_finished_at"]
        assert row["step_finished_at"] <= row["published_at"]


def test_a_run_stores_its_recipe_its_program_and_its_machine(headway, finished):
    [session] = finished.rows("sessions.jsonl")
    assert session["packages"]["ray"] == importlib.metadata.version("ray")
    assert session["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert session["recipe"]["learner"]["learning_rate"] == 1e-6
    again = headway.call("try", "runs/small/recipe.toml", "--set", "name=again", "--prompts", "1")
    assert again.returncode == 0, again.stderr


def test_checkpoints_are_committed_and_the_newest_one_is_exported(headway, finished):
    checkpoints = sorted(path.name for path in (finished.folder / "checkpoints").iterdir())
    assert checkpoints == ["v000002", "v000004", "v000006"]
    exported = headway.call("export", "small", "--to", "model")
    assert exported.stdout == "version 6 in model\n", exported.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = headway.folder / "model"
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(target).eos_token == "<eos>"
    assert not (target / "optimizer").exists()
    source = headway.folder / "runs/small-sft/model"
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    own = {"model.safetensors", "origin.json", "losses.jsonl"}
    kept = [name for name in files if name.name not in own]
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in kept)
    assert {*KEPT_FILES, "config.json", "tokenizer.json"} <= {str(name) for name in kept}
    again = headway.call("export", "small", "--to", "model")
    assert again.returncode == 2
    assert again.stderr == "headway: model exists; name a folder that does not\n"


def test_accounts_balance_and_every_trained_rollout_is_exported(headway, finished):
    accounts = headway.accounting("small")
    counts = (accounts["balanced"], accounts["trained"], accounts["trained_twice"])
    assert counts == (True, 12, 0)
    trained = [row for row in headway.rollouts("small") if row["state"] == "trained"]
    assert len(trained) == 24
    for row in trained:
        sampled = [v for v, mask in zip(row["versions"], row["loss_mask"], strict=True) if mask]
        assert row["trained_version"] - min(sampled) <= 2


def test_a_run_over_a_shared_folder_sends_small_deltas_in_bfloat16(headway, finished):
    first, *others = finished.rows("swaps.jsonl")
    assert (first["codec"], first["seeding"]) == ("full", True)
    deltas = [swap for swap in others if swap["codec"] == "delta"]
    assert deltas
    for swap in deltas:
        assert 0 < swap["changed"] < 0.5
        assert swap["bytes"] < swap["full_bytes"]
    (newest,) = (entry for entry in (headway.folder / "weights").iterdir() if entry.is_dir())
    assert newest.name.startswith("00000006-")


@pytest.mark.parametrize("sort", ["reward", "length"])
@pytest.mark.parametrize("order", [[], ["--lowest"]])
def test_rollouts_of_a_version_are_shown_by_reward_or_length(headway, finished, sort, order):
    samples = read_samples(RunDirectory(finished.folder), 2)
    assert len(samples) == 4
    choose = min if order else max
    best = choose(samples, key=lambda sample: sample.reward if sort == "reward" else sample.tokens)
    shown = headway.call(
        "rollouts", "small", "--version", "2", "--sort", sort, "--count", "1", *order
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == f"── {heading(best)}\n{text_of(best)}\n\n"
    assert "lettered_chain_sum/0/" in shown.stdout


def test_all_rollouts_of_the_newest_version_are_shown_and_no_others(headway, finished):
    every = headway.call("rollouts", "small", "--count", "99").stdout
    assert every.count("── version 5 ·") == 4
    missing = headway.call("rollouts", "small", "--version", "6")
    assert (missing.returncode, "there are 0 to 5" in missing.stderr) == (2, True)


def test_the_driver_and_the_learner_have_a_log(headway, finished):
    log = headway.call("logs", "small", "driver").stdout
    assert "INFO starting Ray" in log
    assert "INFO step 6/6 · reward" in log
    assert "Traceback" not in log
    names = {file.name for file in (finished.folder / "logs").iterdir()}
    assert "driver.log" in names
    assert names - {"driver.log"}
    roles = {"learner-0", "actor-0", "broker", "broadcaster", "worker", "driver"}
    assert {name.rpartition(".")[0] for name in names} <= roles
