"""On a full disk, records are dropped and counted, and a restart is still counted and said."""

import errno
import os
from pathlib import Path

import pytest

from deploy.runtime.restart_budget import RestartBudget
from deploy.storage import jsonl
from tests.deploy.driver.contexts import make_context, output


def refuse(*_: object) -> None:
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
