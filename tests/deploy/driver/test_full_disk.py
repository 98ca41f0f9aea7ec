"""A run whose disk is full drops log lines and waits for space, and does not count as hung."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.runtime.restart_budget import RestartBudget
from deploy.storage import jsonl
from tests.deploy.driver.contexts import make_context, output


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_records_are_dropped_and_counted_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(tmp_path)
    context.jsonl.write("metrics.jsonl", [{"version": 0}])
    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "append_rows", refuse)
        context.jsonl.write("metrics.jsonl", [{"version": 1}, {"version": 2}])
        context.jsonl.write("metrics.jsonl", [{"version": 3}])
    context.jsonl.write("metrics.jsonl", [{"version": 4}])
    versions = [row["version"] for row in context.directory.rows("metrics.jsonl")]
    assert versions == [0, 4]
    printed = output(context)
    assert printed.count("the disk is full: records of metrics.jsonl are dropped") == 1
    assert printed.count("3 records of metrics.jsonl were dropped while the disk was full") == 1


def test_records_that_cannot_be_written_for_another_reason_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        make_context(tmp_path).jsonl.write("metrics.jsonl", [{}])


def test_a_restart_is_counted_and_said_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(tmp_path)
    monkeypatch.setattr(jsonl, "append_rows", refuse)
    context.record_restart("actor-0", RestartBudget(5, in_a_row=1), "it died")
    assert context.record.restarts == {"actor-0": 1}
    assert "actor-0 is restarted (1 of 5 in a row): it died" in output(context)


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed meanwhile"])
def test_a_run_whose_disk_has_room_but_not_for_a_checkpoint_waits_for_longer_than_a_stall(
    tmp_path: Path, mount_disk: Callable[[str], Path], build_model: Callable[..., str], killed: bool
) -> None:
    disk = mount_disk("128m")
    from tests.deploy.broken import sets

    watchdog, deadline = 5.0, time.monotonic() + 400
    sizes = {
        "hidden_size": 96,
        "layers": 3,
        "intermediate_size": 256,
        "kv_heads": 1,
        "head_dim": 32,
    }
    characters = "0123456789+-=,abcdefghijklmnopqr"
    build_model(characters=characters, context=256, **sizes, folder=tmp_path / "model", seed=0)
    case = sets("paused", "steps=40")
    (tmp_path / "recipe.toml").write_text(case.recipe)
    settings = [
        *(*case.settings, f"deploy.runs_dir={disk}", "name=paused"),
        *("learner.checkpoint_every=2", f"deploy.watchdog_seconds={watchdog}"),
    ]
    command = [Path(sys.executable).parent / "headway", "run", "recipe.toml"]
    output, saved = tmp_path / "output", disk / "paused" / "checkpoints" / "v000002"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, *(part for setting in settings for part in ("--set", setting))],
            cwd=tmp_path,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )

    def until(reached: Callable[[], bool]) -> None:
        while not reached():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)

    try:
        until(saved.exists)
        ballast = disk / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 3 * 2**20)
        until(lambda: "paused: no space is left on the disk of" in output.read_text())
        assert shutil.disk_usage(disk).free > 2**20
        shown = time.monotonic()
        until(lambda: time.monotonic() > shown + 6 * watchdog)
        if killed:
            [session] = [p for p in psutil.Process(process.pid).children() if p.children()]
            session.kill()
            until(lambda: "(at 16,777,216 bytes)" in output.read_text())
        ballast.unlink()
        assert process.wait(300) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert output.read_text().count("(a checkpoint needs") == 1
    assert output.read_text().count("the pause is over; the run goes on") == (not killed)
    summary = json.loads((disk / "paused" / "summary.json").read_text())
    assert summary["restarts"]["driver"] == killed
    assert (summary["status"], summary["version"]) == ("done", 40)
    assert summary["accounting"]["balanced"]
