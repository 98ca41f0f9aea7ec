"""`headway ls`, `logs` and `rollouts`: the runs of a folder, their output and their text."""

import json

import pytest

from deploy.observability.samples import heading, text_of
from deploy.offline.rollouts import read_samples
from deploy.storage.run_directory import RunDirectory
from tests.deploy.conftest import call_main


def run_of(folder, name, summary):
    run = RunDirectory(folder / "runs" / name)
    run.logs.mkdir(parents=True)
    run.recipe_file.write_text("")
    if summary is not None:
        run.summary_file.write_text(json.dumps(summary))
    return run


def test_every_run_is_listed_whatever_its_state(tmp_path):
    figures = {"version": 3, "steps": 9, "seconds": 90.0, "heldout": [{"score": 0.25}]}
    run_of(tmp_path, "mine", {"status": "done", **figures})
    run_of(tmp_path, "other", {"status": "running", **figures, "heldout": []})
    run_of(tmp_path, "fresh", None)
    run_of(tmp_path, "broken", {"status": "done"})
    run_of(tmp_path, "lost", [])
    (tmp_path / "runs" / "mine-sft").mkdir()
    listed = call_main(["ls"], tmp_path)
    assert listed.returncode == 0, listed.stderr
    cells = {line.split()[0]: line.split() for line in listed.stdout.splitlines()[1:]}
    assert cells.keys() == {"mine", "other", "fresh", "broken", "lost"}
    assert cells["mine"][1:7] == ["done", "3", "of", "9", "0.250", "1.5"]
    assert cells["other"][1:6] == ["killed", "3", "of", "9", "–"]
    assert cells["broken"][1:] == cells["lost"][1:] == ["damaged"]


def test_a_folder_without_runs_is_no_error(tmp_path):
    assert call_main(["ls", "--runs-dir", "nowhere"], tmp_path).stdout == "no runs in nowhere\n"


def test_a_log_is_chosen_by_the_process_and_an_unknown_one_names_those_that_are(tmp_path):
    run = run_of(tmp_path, "mine", {"status": "done"})
    (run.logs / "actor-0.out").write_text("served\n")
    (run.logs / "actor-0.err").write_text("one\ntwo\nwarned\n")
    (run.logs / "driver.log").write_text("started\n")
    listed = call_main(["logs", "mine"], tmp_path).stdout
    assert [line.split()[2] for line in listed.splitlines()] == [
        "actor-0.err", "actor-0.out", "driver.log",
    ]  # fmt: skip
    shown = call_main(["logs", "mine", "actor-0", "--lines", "2"], tmp_path).stdout
    assert shown.splitlines()[1:3] == ["two", "warned"]
    assert shown.endswith("served\n")
    refused = call_main(["logs", "mine", "actor-1"], tmp_path)
    assert refused.returncode == 2
    assert "no output of 'actor-1'; there is actor-0, driver" in refused.stderr


@pytest.mark.ray
@pytest.mark.deepspeed
class TestOfAFinishedRun:
    @pytest.mark.parametrize("sort", ["reward", "length"])
    @pytest.mark.parametrize("order", [[], ["--lowest"]])
    def test_rollouts_of_a_version_are_shown_by_reward_or_length(
        self, headway, finished, sort, order
    ):
        found = read_samples(RunDirectory(finished.folder), 2)
        assert len(found) == 4
        choose = min if order else max
        best = choose(found, key=lambda one: one.reward if sort == "reward" else one.tokens)
        shown = headway.call(
            "rollouts", "small", "--version", "2", "--sort", sort, "--count", "1", *order
        )
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout == f"── {heading(best)}\n{text_of(best)}\n\n"
        assert "lettered_chain_sum/0/" in shown.stdout

    def test_all_rollouts_of_the_newest_version_are_shown_and_no_others(self, headway, finished):
        every = headway.call("rollouts", "small", "--count", "99").stdout
        assert every.count("── version 5 ·") == 4
        missing = headway.call("rollouts", "small", "--version", "6")
        assert (missing.returncode, "there are 0 to 5" in missing.stderr) == (2, True)

    def test_two_rollouts_of_every_batch_are_kept_as_text(self, finished):
        rows = finished.rows("samples.jsonl")
        assert [row["version"] for row in rows] == [n for n in range(6) for _ in range(2)]
        assert all(row["prompt"].endswith("=") and row["response"] for row in rows)

    def test_batches_have_the_learning_rate_and_the_parts_of_the_reward(self, finished):
        for row in finished.rows("metrics.jsonl"):
            assert row["learning_rate"] == 1e-6
            assert row["reward_parts"] == {"varied:score": pytest.approx(row["reward_mean"])}

    def test_the_driver_and_the_learner_have_a_log(self, headway, finished):
        log = headway.call("logs", "small", "driver").stdout
        assert "INFO starting Ray" in log
        assert "INFO step 6/6 · reward" in log
        assert "Traceback" not in log
        names = {file.name for file in (finished.folder / "logs").iterdir()}
        assert "driver.log" in names
        assert names - {"driver.log"}
        roles = {"learner-0", "actor-0", "broker", "broadcaster", "worker", "driver"}
        assert {name.rpartition(".")[0] for name in names} <= roles
