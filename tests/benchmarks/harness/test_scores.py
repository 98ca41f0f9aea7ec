"""Scores of checkpoints: what is published and evaluated, and what is kept when that fails."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.harness import actor_fleet
from benchmarks.harness.checkpoint_scores import (
    INITIAL,
    SCORED,
    SCORES,
    failures,
    read_scores,
    together,
    write_scores,
)
from benchmarks.harness.comparison import Comparison, ScoredOptions, measure_scored
from benchmarks.harness.training_runs import Arm
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from deploy.preflight.inputs import Inputs
from deploy.preflight.prompts import OpenedPrompts
from queues.records import Evaluation, Prompt


class FakeFleet:
    """Actors whose every version scores a tenth of it; also the broker that asks them."""

    def __init__(self, **changed):
        self.broker = self
        self.changed = changed
        """Figures of the evaluation of version 4."""
        self.events = []

    async def publish(self, version, model):
        self.events.append((version, model.name))

    async def evaluate(self, name, prompts, *, temperature, min_version):
        self.events.append((min_version, prompts[0].prompt_id, len(prompts)))

    async def evaluation(self, name, timeout):
        kind, _, version = name.partition("@")
        version = int(version)
        if version == 4 and self.changed.get("late"):
            await asyncio.sleep(60)
        figures = {
            "count": {"score": 8, "further": 4}[kind], "failed": 0, "score": version / 10,
            "best": None, "incomplete": 0, "lowest_version": version, "highest_version": version,
        }  # fmt: skip
        return Evaluation(**figures | (self.changed if version == 4 else {}))


@pytest.fixture
def stage(tmp_path):
    """Return a recipe of 8 problems, 12 at the end; its inputs; and two runs of two checkpoints."""
    settings = [f"deploy.runs_dir={tmp_path}", "heldout.size=8", "heldout.final_size=12"]
    runs = [tmp_path / name for name in ("first", "second")]
    for run in runs:
        for version in (5, 10):
            (run / "checkpoints" / f"v{version:06d}").mkdir(parents=True)
    problems = [Prompt(prompt_id=f"p/{n}", text="1+1=", answer="2") for n in range(12)]
    opened = OpenedPrompts(source=None, first=[], of_parts=[], problems=problems, evaluations=[])
    inputs = Inputs("start", opened)
    return load_recipe("demo", settings), inputs, runs


def scores_of(run):
    return {version: row["score"] for version, row in read_scores(run).items()}


def test_every_checkpoint_is_a_version_and_the_last_of_a_run_has_further_problems(stage):
    config, inputs, runs = stage
    fleet = FakeFleet()
    asyncio.run(write_scores(config, inputs, fleet, runs))
    assert fleet.events == [
        (0, "start"), (0, "p/0", 8),
        (1, "v000005"), (1, "p/0", 8), (2, "v000010"), (2, "p/0", 8), (2, "p/8", 4),
        (3, "v000005"), (3, "p/0", 8), (4, "v000010"), (4, "p/0", 8), (4, "p/8", 4),
    ]  # fmt: skip
    assert [scores_of(run) for run in runs] == [
        {0: 0.0, 5: 0.1, 10: 0.2},
        {0: 0.0, 5: 0.3, 10: 0.4},
    ]
    assert read_scores(runs[0])[10]["final"]["scored"] == 12
    assert len((runs[0].parent / SCORED).read_text().splitlines()) == 5, "progress, a line for each"


def test_a_score_of_two_parts_is_the_mean_of_their_rollouts():
    parts = [{"score": 0.5, "scored": 8, "failed": 0}, {"score": 1.0, "scored": 2, "failed": 2}]
    assert together(*parts) == {"score": 0.6, "scored": 10, "failed": 2}


def test_a_study_ends_with_the_first_seed_without_a_finished_run(stage, capsys):
    config, _, _ = stage
    base = config.model_copy(update={"model": config.model.model_copy(update={"path": "model"})})
    arms = [
        [Arm(name="0", seed=seed, config=base, worker=("benchmarks.missing",))] for seed in (0, 1)
    ]
    plan = Comparison(options=ScoredOptions(), base=base, arms=arms)
    with pytest.raises(RunFailed, match="no arm came to its end"):
        list(measure_scored(plan, lambda arm: {}))
    printed = capsys.readouterr().out
    assert "1/2  seed 0" in printed
    assert "2/2" not in printed


def test_a_score_is_printed_and_kept_with_the_rollouts_that_failed(stage, capsys):
    config, inputs, runs = stage
    asyncio.run(write_scores(config, inputs, FakeFleet(failed=3, score=1.0), runs))
    assert "second v10: 1.000 (6 of 12, 6 failed)\n" in capsys.readouterr().out
    last = read_scores(runs[1])[10]["final"]
    assert last == {"score": 1.0, "scored": 6, "failed": 6}
    arm = {"name": "2", "seed": 0, "score": 1.0, "heldout": last}
    assert failures([arm]) == ["held-out score, 2, seed 0: 1.000 (6 of 12, 6 failed)"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"score": None}, "each of the 8 rollouts failed"),
        ({"lowest_version": 3}, "scored by versions 3 to 4, and not by 4 alone"),
        ({"late": True}, "8 problems took longer than 0.1 s"),
    ],
)
def test_a_checkpoint_that_cannot_be_scored_is_named_and_costs_no_other_run_its_scores(
    stage, changed, message, capsys
):
    config, inputs, [other, failing] = stage
    fleet = FakeFleet(**changed)
    asyncio.run(write_scores(config, inputs, fleet, [other, failing, other], seconds=0.1))
    assert f"second/checkpoints/v000010: {message}" in capsys.readouterr().out
    assert fleet.events[-1] == (6, "p/8", 4), "the run behind it is scored"
    assert json.loads((other.parent / INITIAL).read_text())["score"] == 0.0
    assert not (failing / SCORES).exists()


@pytest.mark.parametrize("model", ["folder", "organisation/name"])
def test_the_weights_of_a_model_are_those_of_all_its_files(model, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "ab":
        save_file({name: torch.ones(1)}, folder / f"model-{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actor_fleet, "snapshot_download", {"organisation/name": folder}.get)
    assert sorted(actor_fleet.load_weights(Path(model))) == ["a", "b"]
