"""A user's own folder with the name of one of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEADWAY = Path(sys.executable).parent / "headway"


def headway(folder, **environment):
    return subprocess.run(
        [HEADWAY, "validate", "demo"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["actors", "learner", "queues", "weight_sync"])
def test_a_folder_that_hides_a_package_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    result = headway(tmp_path)
    assert result.returncode == 2
    assert f"{tmp_path / name} hides Headway's package {name!r}" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_module_elsewhere_on_the_path_is_named_too(tmp_path):
    hidden = tmp_path / "lib"
    hidden.mkdir()
    (hidden / "queues.py").write_text("")
    result = headway(tmp_path, PYTHONPATH=str(hidden))
    assert result.returncode == 2
    assert str(hidden / "queues.py") in result.stderr


def test_other_folders_are_fine(tmp_path):
    (tmp_path / "data").mkdir()
    assert headway(tmp_path).returncode == 0
