"""The command `serve-tasks`: what it refuses, and the key that it hands out."""

import signal
import subprocess

import pytest

from actors.remote.task_keys import VARIABLE, TaskKeys
from tests.deploy.conftest import ENVIRONMENT, HEADWAY, RECIPE, call_main

SECRET = "a secret of more than sixteen characters"
REMOTE = ("--set", "actors.environment=remote", "--set", "actors.engine=vllm")


@pytest.mark.parametrize(
    ("recipe", "options", "secret", "message"),
    [
        (
            "demo",
            (),
            SECRET,
            'of demo is "single_turn"; agents on other machines play with "remote"',
        ),
        (RECIPE, REMOTE, "short", "needs the environment variable HEADWAY_TASKS_KEY"),
        (RECIPE, (*REMOTE, "--host", "1.2.3.4"), SECRET, "1.2.3.4, port 8701: "),
        ("nothing", (), SECRET, "no recipe 'nothing'"),
    ],
)
def test_what_cannot_be_served_is_bad_input(
    tmp_path, monkeypatch, recipe, options, secret, message
):
    monkeypatch.setenv(VARIABLE, secret)
    done = call_main(["serve-tasks", recipe, *options], tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_key_of_agents_is_written_to_a_file_of_the_user_alone(tmp_path):
    file = tmp_path / "key"
    arguments = ["serve-tasks", RECIPE, *REMOTE, "--port", "0", "--key-file", file]
    process = subprocess.Popen(
        [HEADWAY, *arguments], env={**ENVIRONMENT, VARIABLE: SECRET}, text=True,
        stdout=subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert line.endswith(f"; key of agents: in {file}\n")
    assert file.read_text() == TaskKeys(SECRET.encode()).of_agents + "\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert process.returncode == 130
