"""Contexts of runs, and stages for supervisors, as tests of the driver need them."""

import asyncio
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


def make_terminal():
    return Terminal(Console(file=io.StringIO(), width=400))


def make_context(folder, *, on_drift="alert", **settings):
    """Make the context of a run in a folder, with these settings of [deploy]."""
    directory = RunDirectory(folder)
    console = make_terminal()
    return RunContext(
        config=SimpleNamespace(
            deploy=DeployConfig(**settings),
            queues=SimpleNamespace(on_overdue="wait"),
            heldout=None,
            actors=SimpleNamespace(dtype="float32", vllm_options={}, gold=None),
            learner=SimpleNamespace(dtype="float32", lora=None),
            weight_sync=WeightSyncConfig(on_drift=on_drift),
        ),
        inputs=SimpleNamespace(model_path="model"),
        directory=directory,
        record=Record(name="x", steps=9, max_staleness=2, started_at=0.0),
        console=console,
        jsonl=JsonlWriter(directory.path, console.say),
    )


def output(context):
    """Return everything that was printed so far."""
    return context.console.console.file.getvalue()


class SupervisorStage:
    """The context and the clock of a `supervisor` whose processes live `lives`."""

    def __init__(self, folder, lives, **settings):
        self.events, self.lives, self.waits, self.now = [], list(lives), [], 0.0
        self.context = make_context(folder, **settings)
        self.record = self.context.record
        self.clock = {"monotonic": lambda: self.now, "sleep": self.sleep}
        """Of `Timing`."""

    async def sleep(self, seconds):
        self.waits.append(seconds)

    def rows(self):
        return self.context.directory.rows("restarts.jsonl")

    def play(self):
        async def scenario():
            await self.supervisor.start()
            await self.supervisor.run()

        asyncio.run(asyncio.wait_for(scenario(), 10))
