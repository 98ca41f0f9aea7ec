"""A user's own folder with the name of one of ours."""

import shlex
import subprocess

import pytest

from tests.deploy.conftest import HEADWAY, Headway


@pytest.mark.parametrize("name", ["actors", "headway", "learner", "queues", "weight_sync"])
def test_a_folder_that_hides_a_package_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    result = Headway(tmp_path)("validate", "demo")
    assert result.returncode == 2
    assert f"{tmp_path / name} hides Headway's package {name!r}" in result.stderr
    assert f"(mv {tmp_path / name} {tmp_path / f'my_{name}'})" in result.stderr
    assert "or run headway in a folder" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], []])
def test_help_and_version_are_shown_anywhere(tmp_path, arguments):
    (tmp_path / "queues").mkdir()
    shown = Headway(tmp_path)(*arguments)
    assert (shown.returncode, shown.stderr) == (2 if arguments == [] else 0, "")
    assert "Usage" in shown.stdout or "0." in shown.stdout


def test_a_module_elsewhere_on_the_path_is_named_too(tmp_path):
    hidden = tmp_path / "lib"
    hidden.mkdir()
    (hidden / "queues.py").write_text("")
    command = Headway(tmp_path)
    command.environment["PYTHONPATH"] = str(hidden)
    result = command("validate", "demo")
    assert result.returncode == 2
    assert str(hidden / "queues.py") in result.stderr


def test_other_folders_are_fine(tmp_path):
    (tmp_path / "data").mkdir()
    assert Headway(tmp_path)("validate", "demo").returncode == 0


def test_a_removed_folder_is_refused(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"{shlex.quote(str(HEADWAY))} presets"
    script = f"cd {shlex.quote(str(gone))} && rmdir {shlex.quote(str(gone))} && exec {program}"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "this folder has been removed" in result.stderr
    assert "Traceback" not in result.stderr
