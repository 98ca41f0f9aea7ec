"""The parts of a run that everything in its driver shares."""

from dataclasses import dataclass
from pathlib import Path

from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import Inputs
from deploy.runtime.console import Terminal
from deploy.runtime.restart_budget import RestartBudget
from deploy.runtime.session_process import Session
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import RECOVERIES, RESTARTS, Record
from headway import clock


@dataclass(frozen=True, slots=True)
class RunContext:
    """One session of a run: what it was asked to do, where it writes, and what it has gathered."""

    config: RunConfig
    inputs: Inputs
    directory: RunDirectory
    record: Record
    console: Terminal
    jsonl: JsonlWriter
    checkpoint: tuple[int, Path] | None = None
    """Version and folder of the checkpoint that the learner goes on from."""
    process: Session | None = None
    """This process, where it has a parent that starts it again after a crash."""
    session: str | None = None
    """Row that the session begins with, as JSON (`deploy.storage.sessions`)."""

    @property
    def is_again(self) -> bool:
        """True if this process was started again after a crash."""
        return self.process is not None and self.process.is_again

    def record_restart(self, name: str, budget: RestartBudget, reason: str) -> None:
        """Count, print and write that a process is restarted, as its budget allowed."""
        self.record.restarts[name] += 1
        in_a_row = budget.in_a_row
        self.console.say(f"{name} is restarted ({in_a_row} of {budget.limit} in a row): {reason}")
        row = {"actor": name, "at": clock.now(), "in_a_row": in_a_row, "reason": reason}
        self.jsonl.write(RESTARTS, [row])

    def record_recovery(self, name: str, seconds: float) -> None:
        """Add and write how long a process was away that works again."""
        self.record.away[name] = self.record.away.get(name, 0.0) + seconds
        self.jsonl.write(RECOVERIES, [{"process": name, "at": clock.now(), "seconds": seconds}])
