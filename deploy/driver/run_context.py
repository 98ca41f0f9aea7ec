"""The parts of a run that everything in its driver shares."""

from dataclasses import dataclass
from pathlib import Path

from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import Inputs
from deploy.runtime.console import Terminal
from deploy.runtime.session_process import Session
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record


@dataclass(frozen=True, slots=True)
class RunContext:
    """One session of a run: what it was asked to do, where it writes, and what it has gathered."""

    config: RunConfig
    inputs: Inputs
    directory: RunDirectory
    record: Record
    console: Terminal
    jsonl: JsonlWriter
    """Writes the JSON-lines files of the directory."""
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
