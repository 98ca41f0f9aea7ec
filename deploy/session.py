"""A session of a run: from its start or resumption to its end, whichever that is.

What happens in between is `deploy.run`.
"""

import asyncio
import time
from typing import Any

import psutil

from deploy.cluster.ray_cluster import cluster
from deploy.config.run_config import RunConfig
from deploy.driver.restore import restore
from deploy.errors import Interrupted, RunFailed
from deploy.preflight.inputs import Inputs
from deploy.report.report import draw
from deploy.report.summary import summarise
from deploy.run import Run
from deploy.runtime.console import Screen
from deploy.runtime.signals import deferred, raise_interrupts
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from queues.readers.accounting import newest_checkpoint, read_accounting


def run(
    config: RunConfig, inputs: Inputs, directory: RunDirectory, screen: Screen
) -> dict[str, Any]:
    """Trains to the end of a recipe; goes on where an earlier session of the run ended.

    Returns:
        The summary, which is also in the run's folder.

    Raises:
        RunFailed: A process of the run died or raised, or nothing moved before a deadline.
        Interrupted: The user stopped it; names the newest checkpoint.
    """
    record = restore(config, directory, now=psutil.Process().create_time())
    status = "failed"
    try:
        screen.say("starting Ray")
        with cluster(config, directory.logs):
            try:
                asyncio.run(Run(config, inputs, directory, screen, record).run())
            finally:
                raise_interrupts()  # an event loop leaves SIGTERM deadly behind
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise Interrupted(where_it_stands(directory)) from None
    except RunFailed as error:
        error.add_logs(directory.logs)
        raise
    finally:
        with deferred():
            summary = finish(record, directory, status)
            if status != "interrupted":
                picture(record, directory, screen)
    return summary


def finish(record: Record, directory: RunDirectory, status: str) -> dict[str, Any]:
    """Writes the last figures of a session."""
    if directory.ledger.exists():
        record.accounting = read_accounting(directory.path).to_dict()
    summary = summarise(record, status=status, now=time.time())
    directory.write_summary(summary)
    return summary


def picture(record: Record, directory: RunDirectory, screen: Screen) -> None:
    """Draws the run; what goes wrong there changes nothing about how it ended."""
    try:
        draw(record, directory)
    except Exception as error:  # noqa: BLE001
        screen.say(f"no report was drawn ({error!r}); try `headway report {directory.path}`")


def where_it_stands(directory: RunDirectory) -> str:
    """What an interrupted run keeps, and how to go on."""
    saved = newest_checkpoint(directory.path) if directory.ledger.exists() else None
    kept = f"version {saved[0]} is in {saved[1]}" if saved else "there is no checkpoint yet"
    return f"stopped by the user; {kept}\ngo on with: headway resume {directory.path}"
