"""Figures reach trackers by name and version; a tracker that fails harms nobody."""

import sys
import threading
import time
from dataclasses import replace
from html import escape
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.observability.samples import Sample
from deploy.observability.trackers import Trackers, numbers
from headway.errors import InputError

ROW = {
    "version": 3, "reward_mean": 0.5, "max_lag": None, "lag_histogram": {"0": 7},
    "step_started_at": 1e9,
}  # fmt: skip
FIGURES = {"batch/reward_mean": 0.5, "batch/lag_histogram/0": 7.0}
"""The figures of that row by the names that trackers get."""


SAMPLE = Sample(
    version=3, group_id="g1", prompt_id="sums/0/7", sample_index=1,
    reward=0.5, reward_parts={"task": 0.5},
    tokens=4, lag=1, finish_reason="stop", prompt="2+2=", response="4\x1b[2J <b>\n",
)  # fmt: skip
SHOWN = (
    "version 3 · g1/1 · sums/0/7 · reward 0.5 · 4 tokens · stop · lag 1\n2+2=\n──▶\n4\\x1b[2J <b>\n"
)


class Recording:
    """A tracker that writes down what it gets."""

    def __init__(self, events):
        self.events = events

    def log(self, version, figures):
        self.events.append((version, dict(figures)))

    def text(self, version, content):
        self.events.append((version, content))

    def close(self):
        self.events.append("closed")


class Failing:
    def __init__(self, error):
        self.error = error

    def log(self, version, figures):
        raise self.error

    def close(self):
        raise AssertionError("was left out before")


def made(kinds, by_kind, said, **options):
    factories = {kind: lambda *_, kind=kind: by_kind[kind] for kind in by_kind}
    config = SimpleNamespace(deploy=SimpleNamespace(trackers=kinds))
    return Trackers(config, None, said.append, factories, **options)


def recipe(kind):
    return load_recipe("demo", [f'deploy.trackers=["{kind}"]'])


def test_a_batch_with_its_rollouts_as_text_is_logged_at_the_version_that_it_made():
    events = []
    tracker = made(["one"], {"one": Recording(events)}, [])
    tracker.batch(ROW)
    tracker.samples([replace(SAMPLE, version=2), SAMPLE])
    tracker.samples([])
    tracker.scores(4, {"greedy": 0.75, "sampled": None})
    tracker.close(60.0)
    assert events == [(4, FIGURES), (4, SHOWN), (4, {"heldout/greedy": 0.75}), "closed"]


@pytest.mark.parametrize("error", [OSError("no network"), SystemExit(3), KeyboardInterrupt()])
def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(error):
    events, said = [], []
    tracker = made(["bad", "good"], {"bad": Failing(error), "good": Recording(events)}, said)
    tracker.batch(ROW)
    tracker.batch({**ROW, "version": 4})
    tracker.close(60.0)
    assert [version for version, _ in events[:-1]] == [4, 5]
    assert said == [f"tracker bad failed and is left out from now on: {error!r}"]


@pytest.fixture
def hanging():
    """Provide a tracker that takes no call before the end of the test."""
    answers = threading.Event()
    yield SimpleNamespace(log=lambda *_: answers.wait(), close=lambda: None)
    answers.set()


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end_nor_other_trackers(hanging):
    events, said = [], []
    tracker = made(["hangs", "one"], {"hangs": hanging, "one": Recording(events)}, said)
    tracker.batch(ROW)
    tracker.close(2.0)
    assert events == [(4, FIGURES), "closed"]
    assert said == ["tracker hangs failed and is left out from now on: it does not end"]


def test_a_tracker_that_hangs_is_left_out_when_too_many_calls_wait(hanging):
    said = []
    tracker = made(["hangs"], {"hangs": hanging}, said, most_waiting=3)
    for _ in range(5):
        tracker.batch(ROW)
    assert said == ["tracker hangs failed and is left out from now on: 3 calls wait for it"]


class FakeMlflow:
    """A client of MLflow that writes down its calls, and knows the experiments that were made."""

    def __init__(self):
        self.events, self.experiments = [], {}

    def __call__(self, address):
        self.events.append(("address", address))
        return self

    def get_experiment_by_name(self, name):
        known = self.experiments.get(name)
        return known and SimpleNamespace(experiment_id=known)

    def create_experiment(self, name):
        return self.experiments.setdefault(name, "7")

    def create_run(self, experiment, run_name):
        self.events.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def __getattr__(self, name):
        return lambda run, *arguments, **options: self.events.append(
            (name, run, *arguments, *options.values())
        )


def is_parameters(event):
    return event[0] == "log_batch" and len(event[2][0]) == 2


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(tmp_path, monkeypatch):
    entities = SimpleNamespace(
        Metric=lambda key, value, at, step: (key, value, step), Param=lambda *pair: pair
    )
    client = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    for _ in range(2):
        tracker = Trackers(recipe("mlflow"), tmp_path, pytest.fail)
        tracker.batch(ROW)
        tracker.scores(4, {"pass@4": 0.75})
        tracker.samples([SAMPLE])
        tracker.close(60.0)
    events = [event for event in client.events if not is_parameters(event)]
    address = ("address", (tmp_path / "mlflow").as_uri())
    session = [
        ("update_run", "abc", "RUNNING"),
        ("log_batch", "abc", [(name, figure, 4) for name, figure in FIGURES.items()]),
        ("log_batch", "abc", [("heldout/pass_4", 0.75, 4)]),
        ("log_text", "abc", SHOWN, "samples/v000004.txt"),
        ("set_terminated", "abc"),
    ]
    assert events == [address, ("run", "7", "demo"), *session, address, *session]
    batches = [event[2] for event in client.events if is_parameters(event)]
    assert max(map(len, batches)) <= 100
    params = [pair for batch in batches for pair in batch]
    assert len(dict(params)) == len(params)
    assert dict(params)["learner.learning_rate"] == "0.0003"


def test_numbers_are_told_from_the_rest():
    row = {"a": True, "b": "text", "c": 2, "d": {"e": None, "f": 0.5}}
    assert numbers(row) == {"c": 2.0, "d/f": 0.5}


def test_a_tracker_that_there_is_not_is_refused():
    with pytest.raises(InputError, match=r"deploy.trackers"):
        recipe("excel")


def test_a_score_that_comes_late_and_a_resumed_run_are_not_lost_to_weights_and_biases(
    tmp_path, monkeypatch
):
    begun, events = [], []

    run = SimpleNamespace(
        define_metric=lambda name, **how: events.append((name, how)),
        log=lambda figures, step=None: events.append((figures, step)),
        finish=lambda: events.append("closed"),
    )

    def init(**arguments):
        begun.append((arguments["id"], arguments["resume"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Html=str))
    for _ in range(2):
        tracker = Trackers(recipe("wandb"), tmp_path, pytest.fail)
        tracker.batch(ROW)
        tracker.scores(2, {"greedy": 0.75})
        tracker.samples([SAMPLE])
        tracker.close(60.0)
    assert events[: len(events) // 2] == [
        ("policy_version", {}),
        ("*", {"step_metric": "policy_version"}),
        ({**FIGURES, "policy_version": 4}, None),
        ({"heldout/greedy": 0.75, "policy_version": 2}, None),
        ({"samples": f"<pre>{escape(SHOWN)}</pre>", "policy_version": 4}, None),
        "closed",
    ]
    assert begun == [begun[0]] * 2
    assert begun[0][1] == "allow"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_figures(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = Trackers(recipe("tensorboard"), tmp_path, pytest.fail)
    tracker.batch(ROW)
    tracker.samples([SAMPLE])
    tracker.close(60.0)
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [event] = events.Scalars("batch/reward_mean")
    assert (event.step, event.value) == (4, 0.5)
    [text] = events.Tensors("samples/text_summary")
    assert b"    4\\x1b[2J <b>" in text.tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_the_figures_and_the_texts_of_both_sessions(tmp_path, monkeypatch):
    client = pytest.importorskip("mlflow").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for version in (3, 4):
        tracker = Trackers(recipe("mlflow"), tmp_path, pytest.fail)
        tracker.batch({**ROW, "version": version})
        tracker.samples([replace(SAMPLE, version=version)])
        tracker.close(60.0)
    store = client((tmp_path / "mlflow").as_uri())
    [run] = store.search_runs([store.get_experiment_by_name("headway").experiment_id])
    values = [
        (metric.step, metric.value)
        for metric in store.get_metric_history(run.info.run_id, "batch/reward_mean")
    ]
    assert values == [(4, 0.5), (5, 0.5)]
    assert run.info.status == "FINISHED"
    assert run.data.params["learner.loss"] == '"cispo"'
    texts = [file.path for file in store.list_artifacts(run.info.run_id, "samples")]
    assert texts == ["samples/v000004.txt", "samples/v000005.txt"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_goes_on_offline_in_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    for _ in range(2):  # the second goes on, as a resumed run does
        tracker = Trackers(recipe("wandb"), tmp_path, pytest.fail)
        tracker.batch(ROW)
        tracker.scores(2, {"greedy": 0.75})
        tracker.close(60.0)
        ended = int(time.time())
        while int(time.time()) == ended:  # W&B names its folders by the second
            time.sleep(0.05)
    folders = [*(tmp_path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
