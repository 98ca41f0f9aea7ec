"""Runs whose terminal or reader goes away, and what is left of a run where nobody reaps."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

import pytest

from queues.readers.checkpoints import newest_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

PROCESS_1 = """
import json, os, pathlib, subprocess, sys
process = subprocess.Popen(sys.argv[2:])  # the only one that is waited for
code = process.wait()
zombies = []
for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    pid, _, rest = path.read_text().partition(" ")
    name, _, rest = rest.rpartition(") ")
    zombies += [name] if rest.startswith("Z") else []
pathlib.Path(sys.argv[1]).write_text(json.dumps({"code": code, "zombies": zombies}))
"""


@pytest.fixture
def ray_folder(headway, monkeypatch):
    """Have Ray keep its files in a folder of the test, whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    monkeypatch.setitem(headway.environment, "RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_a_lost_terminal_saves_a_checkpoint_and_the_run_goes_on_from_it(headway, ray_folder):
    master, terminal = pty.openpty()

    def read():
        while True:
            try:
                os.read(master, 65536)
            except OSError:
                return

    process = subprocess.Popen(
        headway.arguments(
            "run", "name=hangs-up", "steps=60", "heldout.every=60", "deploy.checkpoint_seconds=120"
        ),
        stdin=terminal, stdout=terminal, stderr=terminal, cwd=headway.folder,
        env={**headway.environment, "PYTHONIOENCODING": "ascii"}, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    headway.wait_for_batches("hangs-up", 3, process)
    [private] = ray_folder.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    os.killpg(process.pid, signal.SIGHUP)  # what a shell does when its terminal is lost
    os.close(master)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(300) == 130
    assert list(ray_folder.iterdir()) == []
    run = headway.run_folder("hangs-up")
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    version, _ = newest_checkpoint(run)
    assert version >= 3
    assert headway.accounting("hangs-up")["balanced"]
    done = headway("resume", "hangs-up")
    assert done.returncode == 0, done.stderr
    assert headway.accounting("hangs-up")["trained"] == 120


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a process 1 of its own")
def test_a_run_whose_reader_is_gone_ends_well_and_leaves_neither_zombie_nor_folder(
    headway, ray_folder, tmp_path
):
    report = tmp_path / "report.json"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", PROCESS_1]
    process = subprocess.Popen(
        [*command, report, *headway.arguments("run", "name=unread")],
        cwd=headway.folder, env={**headway.environment, "PYTHONIOENCODING": "ascii"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert "checking the recipe" in process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert json.loads(report.read_text()) == {"code": 0, "zombies": []}, errors
    run = headway.run_folder("unread")
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert run.stat().st_mode & 0o777 == 0o700
    assert "step 4/4" in (run / "logs" / "driver.log").read_text()
    assert list(ray_folder.iterdir()) == []
