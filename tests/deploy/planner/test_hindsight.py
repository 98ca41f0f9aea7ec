"""A run beside the predictions that its first batches give of it."""

import pytest

from deploy.config.loader import load_recipe
from deploy.planner import hindsight
from deploy.planner.hindsight import EARLY, look_back
from deploy.report.tables import PREDICTED
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from tests.deploy.leased import train_early

SMALL = ("prompts.groups_per_batch=1", "prompts.group_size=2", "actors.max_concurrent_rollouts=8")


def test_the_later_batches_are_predicted_from_the_first_ones(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    batches = train_early(run, steps=EARLY + 8, staleness=1)
    config = load_recipe("demo", [*SMALL, "queues.max_staleness=1"])
    document = look_back(run, config)
    assert document == look_back(run, config), "the same again"
    assert document["batches"] == EARLY
    assert any("the run was evaluated while it trained" in doubt for doubt in document["doubts"])
    figures = document["figures"]
    assert list(figures) == list(PREDICTED)
    leased = batches[EARLY : EARLY + 8 - 2]
    seconds = leased[-1]["step_finished_at"] - batches[EARLY - 1]["step_finished_at"]
    speed = figures["samples_per_second"]
    assert speed["happened"] == pytest.approx(2 * len(leased) / seconds)
    whole = batches[-1]["step_finished_at"] - batches[0]["wait_started_at"]
    assert figures["seconds"]["happened"] == pytest.approx(whole)
    left = 16 / speed["predicted"][1]
    known = batches[EARLY - 1]["step_finished_at"] - batches[0]["wait_started_at"]
    assert figures["seconds"]["predicted"][1] == pytest.approx(known + left)
    for figure in figures.values():
        assert figure["predicted"] == sorted(figure["predicted"])
    monkeypatch.setattr(hindsight, "counted_steps", lambda config: 3)
    assert "lag_max" not in look_back(run, config)["figures"], "of fewer batches it is smaller"


def test_a_run_that_ends_after_its_first_batches_is_not_predicted(tmp_path):
    run = RunDirectory(tmp_path)
    train_early(run, steps=EARLY + 3, staleness=1)
    with pytest.raises(InputError, match=f"too few batches after the first {EARLY}"):
        look_back(run, load_recipe("demo", [*SMALL, "queues.max_staleness=1"]))
