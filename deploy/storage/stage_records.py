"""The records of the stages of a pipeline that are done, in its folder `.stages`."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.config.pipeline import Stage
from deploy.storage.atomic_folder import UNFINISHED
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
    suite: Any = None
    """Settings of `headway eval` on which they depend."""
    suite_files: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the files that it read, by their paths."""
    files: dict[str, str] = field(default_factory=dict)
    """Those of the data files and model folders that the command of the stage read."""


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

        Those that are to begin anew are not done.

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
            if stage.output.exists() and not self._mark(stage).exists():
                records[stage.name] = record
        return records

    def write(self, stage: Stage, record: DoneStage) -> None:
        """Record that a stage is done."""
        with atomic_file(self._file(stage), durable=True) as file:
            file.write(json.dumps(asdict(record), indent=1).encode())
        self._mark(stage).unlink(missing_ok=True)

    def marked(self, stages: Sequence[Stage]) -> set[str]:
        """Return the names of the stages that are marked as such to begin anew."""
        return {stage.name for stage in stages if self._mark(stage).exists()}

    def mark(
        self, stages: Sequence[Stage], redo: Collection[str], made_with: Callable[[Stage], str]
    ) -> None:
        """Mark the stages of `redo` as such to begin anew, and those that need a marked one.

        One that was marked before goes on, unless it needs one that does not, or is of `redo` and
        `made_with` returns something else than when it was marked.
        """
        marked, anew = {*redo} | self.marked(stages), set[str]()
        for stage in stages:
            if not marked & {stage.name, *stage.needs}:
                continue
            marked.add(stage.name)
            mark, text = self._mark(stage), made_with(stage)
            known = mark.exists() and (stage.name not in redo or mark.read_text() == text)
            if not known or anew & {*stage.needs}:
                anew.add(stage.name)
                with atomic_file(mark, durable=True) as file:
                    file.write(text.encode())

    def begins_anew(self, stage: Stage) -> bool:
        """Return True if a stage is marked, and has nothing since then to go on from."""
        begun = [stage.output, *stage.output.parent.glob(f"{UNFINISHED}/v*")]
        if stage.command == "run":
            begun = [stage.run_folder / "recipe.toml"]
        return self._mark(stage).exists() and not self._since_mark(stage, begun)

    def is_made(self, stage: Stage) -> bool:
        """Return True if the output is there, and was made after the mark, if there is one."""
        return self._since_mark(stage, [stage.output])

    def _since_mark(self, stage: Stage, made: Iterable[Path]) -> bool:
        mark = self._mark(stage)
        marked_at = mark.stat().st_mtime_ns if mark.exists() else 0
        return any(path.exists() and path.stat().st_mtime_ns >= marked_at for path in made)

    def _file(self, stage: Stage) -> Path:
        return self._folder / f"{stage.name}.json"

    def _mark(self, stage: Stage) -> Path:
        return self._folder / f"{stage.name}.anew"
