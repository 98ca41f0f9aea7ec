"""The records of the stages of a pipeline that are done, in its folder `.stages`."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.config.pipeline import Stage
from deploy.storage.jsonl import DAMAGED
from headway.atomic_file import atomic_file
from headway.errors import InputError


@dataclass(frozen=True, slots=True)
class DoneStage:
    """Record of a stage that is done."""

    command: str
    settings: dict[str, Any]
    """Its whole recipe."""
    inputs: dict[str, float]
    """Stages from which it took something, with their `done_at`."""
    done_at: float
    """Seconds since the epoch."""
    seconds: float
    """Time of its commands, of their last try, without that of scoring."""
    scores: dict[str, Any] | None = None
    """Document of `headway eval`; None of reward models, or where nothing is scored yet."""
    suite: list[str] | None = None
    """Arguments of `headway eval` behind the model."""


class StageRecords:
    """The records of the stages of a pipeline, and marks of those that are to begin anew."""

    def __init__(self, pipeline: Path) -> None:
        """Make the folder."""
        self._folder = pipeline / ".stages"
        self._folder.mkdir(parents=True, exist_ok=True)

    def scores_file(self, stage: Stage) -> Path:
        """Return the file for the scores of a stage."""
        return self._folder / f"{stage.name}-scores.json"

    def done(self, stages: Sequence[Stage]) -> dict[str, DoneStage]:
        """Return the records of the stages that are done, and whose output is there, by name.

        Raises:
            InputError: One is damaged.
        """
        records = {}
        for stage in stages:
            try:
                record = DoneStage(**json.loads(self._file(stage).read_bytes()))
            except FileNotFoundError:
                continue
            except DAMAGED as error:
                raise InputError(
                    f"{self._file(stage)} is damaged: {error}; delete it, and the stage ends again"
                ) from None
            if stage.output.exists():
                records[stage.name] = record
        return records

    def write(self, stage: Stage, record: DoneStage) -> None:
        """Record that a stage is done."""
        with atomic_file(self._file(stage), durable=True) as file:
            file.write(json.dumps(asdict(record), indent=1).encode())
        self._mark(stage).unlink(missing_ok=True)

    def forget(self, stage: Stage) -> None:
        """Mark a stage as one to begin anew."""
        self._mark(stage).touch()
        self._file(stage).unlink(missing_ok=True)

    def begins_anew(self, stage: Stage) -> bool:
        """Return True if a stage is marked, and has not begun anew since."""
        begun = stage.run_folder / "recipe.toml" if stage.command == "run" else stage.output
        with suppress(FileNotFoundError):
            marked = self._mark(stage).stat().st_mtime_ns
            return not begun.exists() or begun.stat().st_mtime_ns < marked
        return False

    def _file(self, stage: Stage) -> Path:
        return self._folder / f"{stage.name}.json"

    def _mark(self, stage: Stage) -> Path:
        return self._folder / f"{stage.name}.anew"
