"""What is written to a pipe has no escape codes of a terminal, whatever asks for them."""

import os
import subprocess
import sys

import pytest

from deploy.runtime.output import FORCING
from tests.deploy.conftest import HEADWAY

FORCED = {"GITHUB_ACTIONS": "true", **dict.fromkeys(FORCING, "1")}


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--nope"], ["run", "none.toml"], ["ls"]])
def test_a_command_writes_no_escape_codes_to_a_pipe(arguments, tmp_path):
    environment = {**os.environ, **FORCED, "TERM": "xterm-256color"}
    written = subprocess.run(
        [HEADWAY, *arguments], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert written.stdout + written.stderr
    assert b"\x1b" not in written.stdout + written.stderr


def test_processes_that_a_command_starts_are_asked_for_no_codes(tmp_path):
    program = (
        "import os, sys; from deploy.runtime.output import keep_codes_to_terminals as keep; keep();"
        "print(sorted({'NO_COLOR', 'FORCE_COLOR', 'PY_COLORS'} & {*os.environ}))"
    )
    written = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **FORCED}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert written.stdout == "['NO_COLOR']\n", written.stderr
