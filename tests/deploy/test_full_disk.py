"""A run whose disk is full is neither lost nor taken for one that hangs."""

import asyncio
import errno
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deploy import recorder
from deploy.errors import RunFailed
from deploy.progress import Screen
from deploy.recorder import Recorder
from deploy.run_directory import RunDirectory

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

        async def say(after: int) -> Any:
            return self.status

        async def reports(after: int) -> list[Any]:
            return []

        self.recorder = Recorder(
            SimpleNamespace(
                deploy=SimpleNamespace(stall_seconds=STALL_SECONDS, max_failed_groups=0),
                queues=SimpleNamespace(on_overdue="wait"),
            ),
            SimpleNamespace(version=0, batches=[], swaps=[], max_staleness=2, started_at=0.0),
            RunDirectory(folder),
            Screen(Console(file=self.output, width=200)),
            broker=SimpleNamespace(status=say),
            broadcaster=SimpleNamespace(reports=reports),
            actors=[],
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


def test_a_learner_that_finds_no_room_is_shown_though_the_broker_knows_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "has_room", lambda _: False)
    asyncio.run(run.follow(5 * STALL_SECONDS))
    assert run.output.getvalue().count("paused: no space is left on the disk of") == 1


def test_rows_that_found_no_room_are_written_once_and_whole_when_there_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, full = run.recorder._directory, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    directory.append("metrics.jsonl", [{"version": 0}])
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "has_room", lambda _: False)

        class Half(dict):
            pass

        def failing(row: Any) -> str:
            if isinstance(row, Half):
                raise full
            return "{}"

        patch.setattr("deploy.run_directory.json.dumps", failing)
        run.recorder._write("metrics.jsonl", [{"version": 1}, Half(version=2)])
    assert directory.rows("metrics.jsonl") == [{"version": 0}]
    run.recorder._write("metrics.jsonl", [{"version": 3}])
    assert [row["version"] for row in directory.rows("metrics.jsonl")] == [0, 1, 2, 3]
