"""A user's own folder with the name of one of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEADWAY = Path(sys.executable).parent / "headway"


def headway(folder, *arguments, **environment):
    return subprocess.run(
        [HEADWAY, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["actors", "headway", "learner", "queues", "weight_sync"])
def test_a_folder_that_hides_a_package_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    result = headway(tmp_path, "validate", "demo")
    assert result.returncode == 2
    assert f"{tmp_path / name} hides Headway's package {name!r}" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_advice_is_a_command_to_type(tmp_path):
    (tmp_path / "queues").mkdir()
    result = headway(tmp_path, "validate", "demo")
    assert f"(mv {tmp_path / 'queues'} {tmp_path / 'my_queues'})" in result.stderr
    assert "or run headway in a folder" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], []])
def test_help_and_version_are_shown_anywhere(tmp_path, arguments):
    (tmp_path / "queues").mkdir()
    shown = headway(tmp_path, *arguments)
    assert (shown.returncode, shown.stderr) == (2 if arguments == [] else 0, "")
    assert "Usage" in shown.stdout or "0." in shown.stdout


def test_a_module_elsewhere_on_the_path_is_named_too(tmp_path):
    hidden = tmp_path / "lib"
    hidden.mkdir()
    (hidden / "queues.py").write_text("")
    result = headway(tmp_path, "validate", "demo", PYTHONPATH=str(hidden))
    assert result.returncode == 2
    assert str(hidden / "queues.py") in result.stderr


def test_other_folders_are_fine(tmp_path):
    (tmp_path / "data").mkdir()
    assert headway(tmp_path, "validate", "demo").returncode == 0
