"""`headway bench presets`: its table where figures are missing, and the warm start it takes."""

import json

import pytest

from benchmarks.loop import presets
from benchmarks.loop.presets import PresetOptions, PresetRuns, figures, markdown, prepare
from deploy.config.loader import load_recipe
from deploy.preflight.model_origins import warm_start_origin
from deploy.storage.atomic_folder import ORIGIN_FILE
from deploy.storage.run_directory import RunDirectory


def written(folder, rows, **changes):
    """Write and return a finished run."""
    summary = {
        "status": "done", "heldout": [], "heldout_sampled": [], "optimizer_steps": len(rows),
        "max_lag_trained": None, "ess_mean": None, "samples_per_second": None, "seconds": 2.0,
        **changes,
    }  # fmt: skip
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDirectory(folder)


def test_what_a_run_has_no_figure_for_is_a_dash_and_the_best_score_is_first(tmp_path):
    rows = [{"reward_mean": value, "response_length_mean": 10.0} for value in (0.25, None, 0.75)]
    scored = [{"score": 0.125, "size": 50}, {"score": 0.5, "size": 50, "failed": 7}]
    whole = figures(written(tmp_path / "whole", rows, heldout=scored, ess_mean=0.75))
    empty = figures(written(tmp_path / "empty", []))
    assert whole["reward_last"] == 0.5
    assert (whole["greedy_before"], whole["greedy_after"], whole["problems"]) == (0.125, 0.5, 50)
    assert empty["reward_last"] is empty["length_last"] is empty["greedy_after"] is None
    document = {
        "steps": 3, "seed": 1, "command": "c", "commit": "0" * 40, "time": "t",
        "presets": {"empty": empty, "failed": {"status": "failed with exit code 1"}, "grpo": whole},
    }  # fmt: skip
    table = markdown(document).splitlines()[-5:]
    assert table == [
        "| `grpo` | 0.125 | 0.500 | – | 0.500 | 10 | 3 | – | 0.750 | – | 2 |",
        "| `empty` | – | – | – | – | – | 0 | – | – | – | 2 |",
        "| `failed` | failed with exit code 1 |",
        "",
        "`grpo`: 7 of 50 rollouts failed.",
    ]


@pytest.mark.parametrize(("seed", "taken"), [(0, True), (1, False)])
def test_a_warm_start_is_taken_only_where_it_was_made_by_the_same_settings(
    tmp_path, monkeypatch, seed, taken
):
    commands = []
    monkeypatch.setattr(presets, "make_model", lambda command, *_: commands.append(command))
    options = PresetOptions(presets=("grpo", "ppo_rlhf"), seed=seed)
    runs = PresetRuns(options=options, folder=tmp_path / "out")
    there = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'runs'}"])
    wanted = load_recipe("demo", runs.shared)
    there.warm_start.mkdir(parents=True)
    (there.warm_start / ORIGIN_FILE).write_text(warm_start_origin(there))
    prepare(wanted, there, runs)
    assert (wanted.warm_start / ORIGIN_FILE).exists() is taken
    assert commands == [*([] if taken else ["sft"]), "reward-model"]
