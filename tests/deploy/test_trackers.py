"""Figures reach trackers by name and version; a tracker that fails harms nobody."""

import pytest

from deploy import trackers
from deploy.config import load_recipe
from deploy.errors import InputError
from deploy.trackers import Trackers, check, numbers

ROW = {
    "version": 3,
    "reward_mean": 0.5,
    "max_lag": None,
    "lag_histogram": {"0": 7},
    "step_started_at": 1e9,
}


class Recording:
    """A tracker that writes down what it gets."""

    def __init__(self, events):
        self.events = events

    def log(self, version, figures):
        self.events.append((version, dict(figures)))

    def close(self):
        self.events.append("closed")


class Failing:
    def log(self, version, figures):
        raise OSError("no network")

    def close(self):
        raise AssertionError("was left out before")


def made(kinds, by_kind, said):
    factories = {kind: lambda *_, kind=kind: by_kind[kind] for kind in by_kind}
    return Trackers(kinds, None, "mine", {}, said.append, factories)


def test_a_batch_is_logged_at_the_version_that_it_made():
    events = []
    tracker = made(["one"], {"one": Recording(events)}, [])
    tracker.batch(ROW)
    tracker.scores(4, {"greedy": 0.75, "sampled": None})
    tracker.close()
    assert events == [
        (4, {"batch/reward_mean": 0.5, "batch/lag_histogram/0": 7.0}),
        (4, {"heldout/greedy": 0.75}),
        "closed",
    ]


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on():
    events, said = [], []
    tracker = made(["bad", "good"], {"bad": Failing(), "good": Recording(events)}, said)
    tracker.batch(ROW)
    tracker.batch({**ROW, "version": 4})
    tracker.close()
    assert [version for version, _ in events[:-1]] == [4, 5]
    assert said == [
        "tracker bad failed and is left out from now on: OSError('no network')",
    ]


def test_numbers_are_told_from_the_rest():
    assert numbers({"a": True, "b": "text", "c": 2, "d": {"e": None, "f": 0.5}}) == {
        "c": 2.0,
        "d/f": 0.5,
    }


def test_what_is_not_installed_is_named_before_the_run_begins(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r'pip install "headway-rl\[wandb\]"'):
        check(["wandb"])


def test_a_recipe_names_trackers_that_there_are():
    assert load_recipe("demo", ['deploy.trackers=["tensorboard"]']).deploy.trackers
    with pytest.raises(InputError, match=r"deploy.trackers"):
        load_recipe("demo", ['deploy.trackers=["excel"]'])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_figures(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = Trackers(["tensorboard"], tmp_path, "mine", {}, pytest.fail)
    tracker.batch(ROW)
    tracker.close()
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [event] = events.Scalars("batch/reward_mean")
    assert (event.step, event.value) == (4, 0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_has_the_figures_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = Trackers(["wandb"], tmp_path, "mine", {"steps": 3}, pytest.fail)
    tracker.batch(ROW)
    tracker.close()
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = folder.glob("*.wandb")
    assert b"batch/reward_mean" in file.read_bytes()
