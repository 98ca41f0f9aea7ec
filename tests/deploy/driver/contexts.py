"""Contexts of runs, as tests of the driver need them."""

import io
from types import SimpleNamespace

from rich.console import Console

from deploy.config.deploy_config import DeployConfig
from deploy.driver.run_context import RunContext
from deploy.runtime.console import Terminal
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from weight_sync.config import WeightSyncConfig


def make_context(folder, *, on_drift="alert", **settings):
    """Make the context of a run in a folder, with these settings of [deploy]."""
    directory = RunDirectory(folder)
    console = Terminal(Console(file=io.StringIO(), width=400))
    return RunContext(
        config=SimpleNamespace(
            deploy=DeployConfig(**settings),
            queues=SimpleNamespace(on_overdue="wait"),
            weight_sync=WeightSyncConfig(on_drift=on_drift),
        ),
        inputs=None,
        directory=directory,
        record=Record(name="x", steps=9, max_staleness=2, started_at=0.0),
        console=console,
        jsonl=JsonlWriter(directory.path, console.say),
    )


def output(context):
    """Return everything that was printed so far."""
    return context.console.console.file.getvalue()
