"""Training runs of a comparison, one process after the other: progress, failures, resuming."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Progress, run_with_progress
from benchmarks.harness.record import Record, code_checksum, environment
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError

BATCHES = "metrics.jsonl"
"""File in the folder of a run with a line for each batch."""
WORKER = "benchmarks.loop.run_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One training run of a comparison."""

    name: str
    """Name in tables."""
    config: RunConfig
    seed: int = 0
    kind: str = ""
    """The part of the comparison that it belongs to."""
    title: str = ""
    """Its name in progress and messages; by default seed and name."""
    worker: tuple[str | Path, ...] = (WORKER, "train")
    """Module that runs it, and its arguments behind the recipe."""

    @property
    def label(self) -> str:
        """The name of the run in progress and messages."""
        return self.title or f"seed {self.seed} · {self.name}"

    @property
    def directory(self) -> RunDirectory:
        """The folder of the run."""
        return RunDirectory.of(self.config)

    def file(self, suffix: str) -> Path:
        """Return a file beside the folder of the run."""
        return self.config.deploy.runs_dir / f"{self.config.name}{suffix}"

    def environment(self) -> Record | None:
        """Return the provenance of the run; None where it was not stored."""
        file = self.file(".environment.json")
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def key(self) -> tuple[str, str, int]:
        """Its kind, name and seed, which no other run of the comparison has."""
        return self.kind, self.name, self.seed

    def tags(self) -> Record:
        """Return what tells the figures of this run from those of others."""
        return {"kind": self.kind, "name": self.name, "seed": self.seed}

    def is_finished(self) -> bool:
        """Return True if it was finished; raises `InputError` if it was made of another recipe."""
        if not self.directory.summary_file.exists():
            return False
        if self.directory.config() != self.config.with_model_names():
            raise InputError(
                f"{self.directory.path} was made from another recipe, checkout or warm start; name "
                "another --out"
            )
        if self.directory.status() != "done":
            return False
        if (self.environment() or {}).get("code") not in (None, code_checksum()):
            raise InputError(f"{self.directory.path} was made by other code; name another --out")
        return True

    def failed(self, reason: str) -> Record:
        """Print why the arm is left out, and return it as a record."""
        print(reason, flush=True)
        return self.tags() | {"why": reason}


def vary(base: RunConfig, name: str, **changes: dict[str, Any]) -> RunConfig:
    """Return the recipe of an arm; raises `InputError` where the changes do not go together."""
    try:
        return base.updated(name=name, **changes)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


class TrainingRuns:
    """Runs a number of arms one after the other; prints which it is and the time left."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._code = total, 0, code_checksum()
        self._seconds: list[float] = []

    def run(self, arm: Arm) -> RunDirectory:
        """Run an arm, with the file of its recipe, in a process; raises as `raise_failure`.

        Raises also InputError, if the code has changed since the first arm.
        """
        if code_checksum() != self._code:
            raise InputError("the code has changed meanwhile: runs of both cannot be compared")
        recipe, label = arm.file(".json"), arm.label
        recipe.write_text(arm.config.model_dump_json(indent=2))
        arm.file(".environment.json").write_text(json.dumps(environment(), indent=2))
        self._done += 1
        module, *arguments = arm.worker
        took = run_with_progress(
            [sys.executable, "-m", module, recipe, *arguments],
            arm.file(".log"),
            Progress(
                label=label,
                title=f"{self._done}/{self._total}  {label}",
                lines=arm.directory.path / BATCHES,
                total=arm.config.steps,
                finished=self._seconds,
                further=self._total - self._done,
            ),
        )
        self._seconds.append(took)
        return arm.directory

    def train(self, arms: Sequence[Arm]) -> tuple[list[Arm], list[Record]]:
        """Run the arms that are not finished yet; return those that are, and why others failed.

        Raises:
            InputError: An arm refused its input, which the others have too.
        """
        trained, failed = [], []
        for arm in arms:
            try:
                if arm.is_finished():
                    self._done += 1
                else:
                    arm.directory.lock.check_at_rest()  # a process outlives a killed benchmark
                    shutil.rmtree(arm.directory.path, ignore_errors=True)
                    self.run(arm)
                trained.append(arm)
            except RunFailed as error:
                failed.append(arm.failed(str(error)))
        return trained, failed


def commits(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the commits that runs were measured at, each once; "unknown" where none is stored."""
    return sorted({(run["environment"] or {}).get("commit") or "unknown" for run in runs})


def conditions(document: Mapping[str, Any]) -> str:
    """Describe which runs failed, the commits of the others, and the load of the machine."""
    lines = [
        f"left out: seed {failed['seed']}, {failed['name']}: {failed['why']}"
        for failed in document["failed"]
    ]
    measured = commits(document["arms"])
    if measured != [document["commit"]]:
        lines.append(
            f"runs were measured at commit {', '.join(commit[:8] for commit in measured)}; "
            f"this was written at {(document['commit'] or 'unknown')[:8]}"
        )
    known = [run["environment"] for run in document["arms"] if run["environment"]]
    if known:
        largest = max(facts["machine"]["load_average"][0] for facts in known)
        lines.append(
            f"largest load average at the start of a run: {largest:.1f}, the end of the run before "
            "it included"
        )
    return "\n".join(lines)
