"""Fixtures of the tests of benchmarks: commands in a folder with a warm start, and trials."""

import json
import subprocess
import sys

import pytest

from deploy.cli.bench import ROOT
from tests.deploy.conftest import headway

__all__ = ["headway"]


@pytest.fixture
def measured(tmp_path):
    """Return a function that runs a benchmark in a process and returns its record."""

    def run(name, *arguments, timeout):
        file = tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "benchmarks", name, *arguments, "--out", str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(file.read_text())

    return run
