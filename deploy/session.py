"""A session of a run: from its start or resumption to its end, whether good, bad or interrupted."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from deploy.cluster.cpu_affinity import learner_on_cores
from deploy.cluster.ray_cluster import cluster, status_command
from deploy.cluster.worker_logs import end_killed_session
from deploy.config.run_config import RunConfig
from deploy.driver.run_context import RunContext
from deploy.errors import Interrupted, RunFailed
from deploy.planner.hindsight import look_back
from deploy.preflight.inputs import Inputs
from deploy.preflight.machine_checks import backup_warning
from deploy.preflight.memory_check import predict_memory
from deploy.report.report import report
from deploy.report.summary import summarise
from deploy.run import Run
from deploy.runtime.console import Terminal
from deploy.runtime.machine import environment
from deploy.runtime.session_process import Session, resume_hint
from deploy.runtime.signals import deferred, raise_interrupts
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.repair.whole_checkpoints import find_checkpoint
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import restore
from deploy.storage.sessions import begin_session
from headway import clock
from headway.cpu_cores import usable_cores
from headway.errors import HeadwayError
from headway.output_limits import limited_output
from headway.roles import Role
from queues.readers.accounting import read_accounting
from queues.readers.checkpoints import newest_checkpoint


def run(
    config: RunConfig,
    inputs: Inputs,
    directory: RunDirectory,
    console: Terminal,
    process: Session | None = None,
) -> dict[str, Any]:
    """Train to the end of a recipe, from where an earlier session of the run ended.

    `process` is this process, where it has a parent that starts it again. Returns the summary,
    which is also in the run's folder.

    Raises:
        RunFailed: A process of the run died or raised, or nothing moved before a deadline.
        HeadwayError: The ledger or the journal is damaged.
        Interrupted: The user stopped the run; names the newest checkpoint.
    """
    checkpoint = find_checkpoint(directory, console.say)
    record = restore(
        config,
        directory,
        now=process.began_at if process is not None else clock.process_started(),
        say=console.say,
    )
    config = learner_on_cores(config, usable_cores())
    if warning := backup_warning(directory.path, directory.backup):
        console.say(warning)
    jsonl = JsonlWriter(directory.path, console.say)
    context = RunContext(config, inputs, directory, record, console, jsonl, checkpoint, process)
    if process is not None:
        _record_crashes(context, process)
    status = "failed"
    try:
        end_killed_session(directory)
        console.say("starting Ray")
        with (
            limited_output("sources and libraries"),
            cluster(config, directory.logs, may_lack=context.is_again) as ray_logs,
        ):
            console.say(f"to look at Ray: {status_command(config.deploy.ray_address)}")
            about = {
                **environment(),
                "ray_logs": ray_logs and str(ray_logs),
                "models": dict(inputs.models),
            }
            row = begin_session(directory, config, about, version=record.version)
            training = Run(replace(context, session=row))
            try:
                asyncio.run(training.run())
                status = "done"
            finally:
                raise_interrupts()  # an event loop resets SIGTERM to end the process
    except KeyboardInterrupt:
        status = "interrupted"
        saved = directory.ledger.exists() and newest_checkpoint(directory.path, verify=False)
        kept = f"version {saved[0]} is in {saved[1]}" if saved else "there is no checkpoint yet"
        raise Interrupted(f"stopped by the user; {kept}{resume_hint(directory.path)}") from None
    except RunFailed as error:
        if error.exit_code != 1:
            raise
        joined = config.deploy.ray_address != "local"
        output = "the log of the driver" if joined else "the output of every process"
        elsewhere = ", other output with Ray: `ray logs cluster`" if joined else ""
        raise error.with_hint(f"{output} is in {directory.logs}{elsewhere}") from error
    finally:
        with deferred():
            if directory.ledger.exists():
                # The broker of this session verified the rows before it changed them.
                record.accounting = read_accounting(directory.path, verify=False).to_dict()
            summary = summarise(record, status=status, now=clock.now()) | _predicted(
                context, status
            )
            try:
                directory.write_summary(summary)
            except OSError as error:  # a full disk, say: the run has ended as it has
                console.say(f"its summary is not written: {error}")
            if status != "interrupted":
                draw_report(context)
    return summary


def _record_crashes(context: RunContext, process: Session) -> None:
    """Record the crashes of sessions that none has recorded before, as restarts of the driver."""
    first = process.budget.in_a_row - len(process.crashes) + 1
    for in_a_row, crash in enumerate(process.crashes, start=first):
        budget = replace(process.budget, in_a_row=max(1, in_a_row))
        context.record_restart(Role.DRIVER, budget, crash)
    process.has_recorded()


def _predicted(context: RunContext, status: str) -> dict[str, Any]:
    """Return what was predicted of a run that is done, beside what happened; no error ends it."""
    predicted: dict[str, Any] = {}
    if status != "done":
        return predicted
    for part in (partial(look_back, context.directory, context.config), partial(_memory, context)):
        try:
            predicted |= part()
        except HeadwayError:  # it is too short, say
            continue
        except Exception as error:  # noqa: BLE001
            context.console.say(f"nothing that was predicted is compared: {error!r}")
    return {"predicted": predicted} if predicted else {}


def _memory(context: RunContext) -> dict[str, Any]:
    """Return the memory predicted of each role, beside its peak on this machine."""
    peaks = context.record.memory
    if not peaks or isinstance(prediction := predict_memory(context.config), str):
        return {}
    needs = {process.role: process.all_resident for process in prediction.processes}
    roles = {role: {"predicted": needs[role], "happened": peaks[role]} for role in needs}
    return {"memory": roles}


def draw_report(context: RunContext) -> None:
    """Draw the report of a run that has trained something, and has ended: errors are printed."""
    directory = context.directory
    try:
        if context.record.batches:
            report(directory)
    except Exception as error:  # noqa: BLE001
        context.console.say(
            f"no report was drawn ({error!r}); try `headway report {directory.path}`"
        )
