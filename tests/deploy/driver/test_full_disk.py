"""A run whose disk is full is neither lost nor taken for one that hangs."""

import asyncio
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deploy.config.run_config import DeployConfig
from deploy.driver import recorder
from deploy.driver import restart_policy as restarts
from deploy.driver.recorder import Recorder
from deploy.driver.restart_policy import Restarts
from deploy.errors import RunFailed
from deploy.runtime.console import Screen
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record

STALL_SECONDS = 0.2


def status(**changes: Any) -> SimpleNamespace:
    values = {
        "version": 1, "steps": 9, "accepted": 5, "depth": {"failed": 0}, "paused": None,
        "batches": [], "evaluations": [], "waits_for": {}, "engines": {}, "last_error": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


class Run:
    """A recorder whose broker says what the test says."""

    def __init__(self, folder: Path) -> None:
        self.status, self.output = status(), io.StringIO()
        self.learner_waits: str | None = None
        self.asked: list[str] = []

        async def say(after: int) -> Any:
            return self.status

        async def reports(after: int) -> list[Any]:
            return []

        async def paused() -> str | None:
            self.asked.append("learner")
            return self.learner_waits

        async def accounting() -> Any:
            self.asked.append("accounts")
            await asyncio.Event().wait()  # as long as the broker pauses

        self.recorder = Recorder(
            SimpleNamespace(
                deploy=SimpleNamespace(stall_seconds=STALL_SECONDS, max_failed_groups=0),
                queues=SimpleNamespace(on_overdue="wait"),
            ),
            Record(name="x", steps=9, max_staleness=2, started_at=0.0),
            RunDirectory(folder),
            Screen(Console(file=self.output, width=200)),
            broker=SimpleNamespace(status=say, accounting=accounting),
            broadcaster=SimpleNamespace(reports=reports),
            learner=SimpleNamespace(paused=paused),
            actors=[],
            rows=JsonlWriter(RunDirectory(folder)),
        )  # type: ignore[arg-type]

    async def follow(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.recorder.follow()
        except TimeoutError:
            pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(recorder, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(recorder, "ASK_SECONDS", 0.05)
    return Run(tmp_path)


def test_a_broker_that_pauses_is_shown_and_does_not_count_as_a_stall(run: Run) -> None:
    async def main() -> None:
        run.status = status(paused="no space is left on the disk of X")
        await run.follow(5 * STALL_SECONDS)
        assert run.output.getvalue().count("paused: no space is left on the disk of X") == 1
        run.status = status()
        await run.follow(STALL_SECONDS / 4)
        assert "there is room again" in run.output.getvalue()
        with pytest.raises(RunFailed, match="nothing moved"):
            await run.follow(20 * STALL_SECONDS)

    asyncio.run(main())


def test_a_learner_that_waits_for_room_is_shown_and_does_not_count_as_a_stall(run: Run) -> None:
    """The disk itself has room, but less than a checkpoint needs: the learner alone knows."""

    async def main() -> None:
        run.learner_waits = "no space is left on the disk of X (a checkpoint needs 9 bytes)"
        await run.follow(5 * STALL_SECONDS)
        shown = "paused: no space is left on the disk of X (a checkpoint needs 9 bytes)"
        assert run.output.getvalue().count(shown) == 1
        assert "goes on" not in run.output.getvalue()
        run.learner_waits = None
        await run.follow(STALL_SECONDS / 4)
        assert run.output.getvalue().count("there is room again") == 1
        with pytest.raises(RunFailed, match="nothing moved"):
            await run.follow(20 * STALL_SECONDS)

    asyncio.run(main())


def test_a_learner_is_asked_before_a_run_ends_as_stalled_however_early_that_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "ASK_SECONDS", 50 * STALL_SECONDS)
    run.learner_waits = "no space is left on the disk of X"
    asyncio.run(run.follow(5 * STALL_SECONDS))
    assert "learner" in run.asked


def test_a_pause_that_begins_while_the_accounts_are_asked_for_is_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "SUMMARY_SECONDS", 0.0)
    monkeypatch.setattr(recorder, "ACCOUNTS_SECONDS", 0.05)

    async def main() -> None:
        following = asyncio.create_task(run.follow(10 * STALL_SECONDS))
        while "accounts" not in run.asked:
            assert not following.done()
            await asyncio.sleep(0.001)
        run.status = status(paused="no space is left on the disk of X")
        await following

    asyncio.run(main())
    assert run.output.getvalue().count("paused: no space is left on the disk of X") == 1


class Half(dict[str, Any]):
    """A row that the disk has no room for."""


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Rows of class `Half` find no room until it is undone."""
    original = json.dumps

    def dumps(row: Any) -> str:
        if isinstance(row, Half):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "deploy.storage.run_directory.json", SimpleNamespace(dumps=dumps, loads=json.loads)
        )
        yield patch


def test_rows_that_found_no_room_are_written_once_and_whole_when_there_is(
    tmp_path: Path, full: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    rows = JsonlWriter(directory)
    rows.write("metrics.jsonl", [{"version": 0}])
    rows.write("metrics.jsonl", [{"version": 1}, Half(version=2)])
    assert rows.kept
    assert directory.rows("metrics.jsonl") == [{"version": 0}]
    full.undo()
    rows.write("metrics.jsonl", [{"version": 3}])
    assert [row["version"] for row in directory.rows("metrics.jsonl")] == [0, 1, 2, 3]
    assert not rows.kept


def test_rows_that_cannot_be_written_for_another_reason_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        JsonlWriter(RunDirectory(tmp_path)).write("metrics.jsonl", [{}])


def test_an_actor_that_dies_while_the_disk_is_full_is_made_again_and_written_down_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, record = RunDirectory(tmp_path), Record("x", 9, 2, 0.0)
    rows = JsonlWriter(directory)
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.0)
    deaths = Restarts(
        "actor-0",
        config=DeployConfig(),
        record=record,
        rows=rows,
        screen=Screen(Console(file=io.StringIO())),
    )

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append", refuse)
        asyncio.run(deaths.allow("it died", worked=0.0))
    assert record.restarts == {"actor-0": 1}
    rows.write("metrics.jsonl", [])
    assert [row["reason"] for row in directory.rows("restarts.jsonl")] == ["it died"]


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_run_whose_disk_has_room_but_not_for_a_checkpoint_pauses_for_longer_than_a_stall(
    tmp_path: Path, mount_disk: Callable[[str], Path]
) -> None:
    disk = mount_disk("128m")
    from learner.config.learner import TinyModelConfig
    from learner.model.policy import build_tiny
    from tests.deploy.broken import sets

    stall, deadline = 15.0, time.monotonic() + 400
    sizes = {"hidden_size": 96, "layers": 3, "intermediate_size": 256, "heads": 2, "kv_heads": 1}
    characters = "0123456789+-=,abcdefghijklmnopqr"
    build_tiny(
        TinyModelConfig(characters=characters, context=256, **sizes), tmp_path / "model", seed=0
    )
    case = sets("paused", "steps=40")
    (tmp_path / "recipe.toml").write_text(case.recipe)
    settings = [
        *(*case.settings, f"deploy.runs_dir={disk}", "name=paused"),
        *("learner.checkpoint_every=2", f"deploy.stall_seconds={stall}"),
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
        until(lambda: time.monotonic() > shown + 2 * stall)
        ballast.unlink()
        assert process.wait(300) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert output.read_text().count("(a checkpoint needs") == 1
    assert output.read_text().count("there is room again: goes on") == 1
    summary = json.loads((disk / "paused" / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", 40)
    assert summary["accounting"]["balanced"]
