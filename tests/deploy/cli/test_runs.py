"""`headway ls`, `logs` and `rollouts`: the runs of a folder, their output and their text."""

import json

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
