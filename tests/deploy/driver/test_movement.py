"""What counts as movement of a run: versions, accepted groups, and engines that took a version."""

import asyncio
import io
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from rich.console import Console

from deploy.driver import recorder
from deploy.driver.recorder import Recorder
from deploy.errors import RunFailed
from deploy.runtime.console import Terminal
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record

STALL_SECONDS = 0.2


@dataclass
class Report:
    """As much of a swap report as counts."""

    engine_id: str = "engine-0"
    error: str | None = None


def follow(folder, monkeypatch, report: Report, seconds: float) -> None:
    """Follows a run in which nothing happens but one such report at every look."""
    monkeypatch.setattr(recorder, "POLL_SECONDS", 0.01)

    async def status(after: int):
        return SimpleNamespace(
            version=1, steps=9, accepted=5, depth={"failed": 0}, paused=None, batches=[],
            evaluations=[], waits_for={}, engines={}, last_error=None,
        )  # fmt: skip

    async def reports(since: int):
        return [report]

    async def paused():
        return None

    config = SimpleNamespace(
        deploy=SimpleNamespace(stall_seconds=STALL_SECONDS, max_failed_groups=0),
        queues=SimpleNamespace(on_overdue="wait"),
    )
    directory = RunDirectory(folder)
    followed = Recorder(
        config,
        Record(name="x", steps=9, max_staleness=2, started_at=0.0),
        directory,
        Terminal(Console(file=io.StringIO(), width=200)),
        broker=SimpleNamespace(status=status),
        broadcaster=SimpleNamespace(reports=reports),
        learner=SimpleNamespace(paused=paused),
        actors=[],
        rows=JsonlWriter(directory),
    )

    async def main() -> None:
        async with asyncio.timeout(seconds):
            await followed.follow()

    asyncio.run(main())


def test_updates_that_fail_over_and_over_do_not_count(tmp_path, monkeypatch) -> None:
    with pytest.raises(RunFailed, match="last failed weight update: LoadFailed: no"):
        follow(tmp_path, monkeypatch, Report(error="LoadFailed: no"), 30)


def test_updates_that_end_well_do(tmp_path, monkeypatch) -> None:
    with pytest.raises(TimeoutError):
        follow(tmp_path, monkeypatch, Report(), 5 * STALL_SECONDS)
