"""`import headway`: runs from a script, inside an event loop, and the results in their folder."""

import contextlib
import subprocess
import sys

import pytest

from deploy.api.training_run import (
    InputError,
    RunFailed,
    RunResults,
    TrainingRun,
    override_settings,
    preparations,
    run,
)
from deploy.config.loader import load_recipe
from headway.file_lock import locked


def test_the_package_is_installed_under_its_name():
    program = "import headway; print(*headway.__all__); print(headway.run.__module__)"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == [
        "InputError", "RunFailed", "RunResults", "TrainingRun", "results", "resume", "run",
        "deploy.api.training_run",
    ], result.stderr  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ({"learner.learning_rate": 1e-6}, "learner.learning_rate", 1e-6),
        ({"learner": {"learning_rate": 1e-6}}, "learner.learning_rate", 1e-6),
        ({"learner": {"loss": "cispo"}}, "learner.learning_rate", 3e-4),  # of the recipe
        ({"name": "a-b"}, "name", "a-b"),
        ({"actors.cores": ["0"]}, "actors.cores", ("0",)),
        ({"learner.fixed_length": 7}, "learner.fixed_length", 7),
        ({"actors.greedy_baseline": False}, "actors.greedy_baseline", False),
        (
            {"actors.reward": ["a:b"], "actors.reward_options": {"a:b": {"x": [1, 'q"\n']}}},
            "actors.reward_options",
            {"a:b": {"x": [1, 'q"\n']}},
        ),
    ],
)
def test_overrides_are_values_of_keys_or_of_sections(overrides, key, value):
    settings = list(override_settings({**overrides, "actors.heldout_reward": ["last_answer"]}))
    config = load_recipe("demo", settings)
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value


def test_a_wrong_recipe_is_refused_at_once_and_leaves_the_path_alone():
    before = list(sys.path)
    with pytest.raises(InputError, match=r"did you mean 'learner\.learning_rate'"):
        run("demo", {"learning_rate": 1.0})
    with pytest.raises(InputError, match=r"^learner\.cores = None: leave out"):
        run("demo", {"learner": {"cores": None}})
    assert sys.path == before


def test_missing_models_are_made_first(tmp_path):
    config = load_recipe("ppo_rlhf", [f"deploy.runs_dir={tmp_path}"])
    assert list(preparations(config)) == ["sft", "reward-model"]
    config.warm_start.mkdir(parents=True)
    (config.warm_start / "config.json").touch()
    assert list(preparations(config)) == ["reward-model"]
    config.reward_models.mkdir()
    assert list(preparations(config)) == []


@pytest.fixture
def started(tmp_path):
    """Return a function that starts shell commands as those of a run named "mine"."""
    with contextlib.ExitStack() as stack:

        def start(*scripts, replaced=None):
            commands = [["sh", "-c", script] for script in scripts]
            made = TrainingRun(tmp_path / "mine", commands, replaced)
            stack.callback(made.stop)
            return made

        yield start


def test_lines_come_as_they_are_printed_until_the_end(started, tmp_path):
    made = started("echo one; while ! test -e go; do sleep 0.05; done; printf two".replace(
        "go", str(tmp_path / "go")
    ))  # fmt: skip
    lines = made.lines()
    assert next(lines) == "one"
    assert made.status == "running"
    (tmp_path / "go").touch()
    assert list(lines) == ["two"]
    assert made.wait() == {}
    assert made.status == "done"
    assert list(made.lines()) == ["one", "two"]


def test_a_command_that_prepares_comes_first_and_its_failure_ends_the_run(started):
    made = started("echo first", "echo headway: it is wrong; exit 2", "echo never")
    with pytest.raises(InputError, match=r"^it is wrong$"):
        made.wait()
    assert made.status == "failed"
    assert list(made.lines()) == ["first", "headway: it is wrong"]


def test_a_run_that_fails_raises_its_message_without_the_lines_before(started):
    made = started("echo '  1.0 s  headway: x'; echo headway: actor-0 died; echo see logs; exit 1")
    with pytest.raises(RunFailed, match=r"^actor-0 died\nsee logs$"):
        made.wait()


def test_a_run_that_is_killed_raises_its_exit_code_and_what_it_printed_last(started):
    for script, message in (
        ("echo one; echo two; kill -9 $$", "mine ended with exit code -9: two"),
        ("exit 3", "mine ended with exit code 3: it printed nothing"),
    ):
        with pytest.raises(RunFailed, match=f"^{message}$"):
            started(script).wait()


def test_stop_interrupts_the_command_and_wait_returns(started):
    made = started("trap 'echo saved; exit 130' INT; echo ready; while :; do sleep 0.05; done")
    assert next(made.lines()) == "ready"
    with pytest.raises(TimeoutError, match=r"mine goes on after 0\.01 s"):
        made.wait(timeout=0.01)
    made.stop()
    assert made.wait() == {}
    assert (made.status, list(made.lines())) == ("interrupted", ["ready", "saved"])
    made.stop()  # once more changes nothing


def test_a_session_that_outlives_its_command_is_waited_for_and_stopped(started, tmp_path):
    (tmp_path / "mine").mkdir()
    program = (
        "import os, signal, time; os.fork() and os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: print('headway: saved', flush=True)"
    )
    with locked(tmp_path / "mine" / "driver.lock"):
        made = started(f'exec {sys.executable} -c "{program}"')
        lines = made.lines()
        assert next(lines) == "ready"
        with pytest.raises(TimeoutError, match=r"mine goes on after 0\.5 s"):
            made.wait(timeout=0.5)
        summary = tmp_path / "mine" / "summary.json"
        summary.write_text('{"status": "interrupted"}')  # of the session before
        assert made.status == "running"
        summary.unlink()
        made.stop()
        assert next(lines) == "headway: saved"
    assert (made.status, list(lines)) == ("killed", [])
    with pytest.raises(RunFailed, match=r"^saved$"):
        made.wait()


def test_results_of_a_run_that_is_replaced_are_not_shown(started, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"version": 7}\n')
    assert RunResults(folder).rows() == [{"version": 7}]
    made = started("true", replaced=folder.stat().st_ino)
    assert (made.rows(), made.summary, list(made.metrics())) == ([], {}, [])


def test_a_table_has_a_column_for_every_key(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"version": 0, "lags": {"0": 4}}\n{"version": 1, "lags": {"1": 2}, "reward": 0.5}\n'
    )
    assert RunResults(tmp_path).table().to_pylist() == [
        {"version": 0, "lags": {"0": 4, "1": None}, "reward": None},
        {"version": 1, "lags": {"0": None, "1": 2}, "reward": 0.5},
    ]


def test_variables_of_a_notebook_do_not_reach_the_run(started, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("FORCE_COLOR", "1")
    made = started('echo "$MPLBACKEND$FORCE_COLOR."')
    assert list(made.lines()) == ["."]
