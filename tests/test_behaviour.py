"""Behaviour that users rely on, compared with the records in `tests/assets`.

Covers the weights of a run without lag, the keys of `summary.json` and `headway inspect --json`,
metrics, commands, exit codes and recipe keys. Other tests already cover the names exported by the
packages (`learner/test_public.py`, `queues/test_public.py`) and, in `tests/deploy`, the keys of a
failed prompt (`runs/test_inspect.py`), refused recipes (`cli/test_bad_input.py`) and the exit codes
of runs that fail (`runs/test_actors_die.py`) or are resumed (`runs/test_resume.py`).
"""

import pytest

from tests import behaviour
from tests.behaviour import FIGURES_LOCKED, recorded

BETWEEN_CPUS = {"rel": 1e-4, "abs": 1e-6}
"""Tolerance of figures; those of kernels for AVX-512 and for SSE differ by a hundredth of it."""


def whole_run(test):
    """Mark a test of the locked run, which CI leaves to other whole runs (`deploy/runs`)."""
    return pytest.mark.slow(pytest.mark.ray(pytest.mark.deepspeed(test)))


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    return behaviour.play(tmp_path_factory.mktemp("locked"))


@whole_run
def test_a_run_without_lag_trains_the_same_weights(locked):
    current, expected = locked["weights"], recorded("weights.json")
    for version, before in zip(current["versions"], expected["versions"], strict=True):
        figures = {name: before[name] for name in FIGURES_LOCKED}
        assert {name: version[name] for name in figures} == pytest.approx(figures, **BETWEEN_CPUS)
    if current["recorded_on"] == expected["recorded_on"]:
        assert current == expected, "the figures agree, the bits of the weights do not"


@whole_run
def test_a_run_without_lag_trains_only_tokens_of_the_newest_version(locked):
    assert locked["lags"] == ["0"]


@whole_run
@pytest.mark.parametrize("document", ["summary", "inspect"])
def test_documents_of_a_run_have_the_same_keys(locked, document):
    assert locked[document] == recorded(f"{document}_keys.json")


@whole_run
def test_processes_of_a_run_show_the_same_metrics(locked):
    expected = {
        name: {metric for metric, about in metrics.items() if about["in_locked_run"]}
        for name, metrics in recorded("metrics.json").items()
    }
    assert {name: set(shown) for name, shown in locked["metrics"].items()} == expected


def types_and_labels(metrics):
    return {
        (process, name): (about["type"], about["labels"])
        for process, shown in metrics.items()
        for name, about in shown.items()
    }


def test_metrics_have_the_same_names_types_and_labels():
    assert types_and_labels(behaviour.all_metrics()) == types_and_labels(recorded("metrics.json"))


def test_commands_take_the_same_arguments_and_options():
    assert behaviour.commands() == recorded("commands.json")


SLOW = {"a cluster that does not answer"}
"""Causes that take half a minute, as attempts go on for so long."""


@pytest.mark.parametrize(
    "cause",
    [
        pytest.param(cause, marks=pytest.mark.slow if cause in SLOW else ())
        for cause in recorded("exit_codes.json")
    ],
)
def test_exit_codes_are_the_same(cause, tmp_path):
    expected = recorded("exit_codes.json")[cause]
    result = behaviour.call(expected["arguments"], tmp_path)
    assert result.returncode == expected["code"], result


def test_recipes_have_the_same_keys_and_defaults():
    assert behaviour.recipe_keys() == recorded("recipe_keys.json")
