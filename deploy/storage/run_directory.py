"""The folder of one run, `runs/<name>/`, and the files in it.

recipe.toml       the resolved recipe          metrics.jsonl   trained batches
ledger.sqlite     states, batches, accounts    swaps.jsonl     weight updates
journal/          accepted rollouts            restarts.jsonl  restarts of actors
checkpoints/      v000060/ …                   waits.jsonl     overdue waits
summary.json      figures of the run           drift.jsonl     engines that drift
                                               sessions.jsonl  recipe, program, machine
logs/             output of every process      report.html     the figures as a page of plots
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.config.loader import load_recipe
from deploy.config.recipe_text import recipe_text
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from queues.readers.accounting import read_accounting
from queues.readers.open_run import is_open
from queues.runtime.atomic_file import atomic_file
from queues.runtime.clean_text import without_secrets_in
from queues.runtime.nearest_name import nearest

LOCK_TRIES = 5
"""Attempts at a lock, since a command that only tests it holds it for a moment."""
LOCK_SECONDS = 0.05
"""Wait between two attempts."""


class RunMissing(InputError):
    """There is no run of a name."""


class RunDirectory:
    """Paths of a run, and the small files that the driver writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_file = path / "recipe.toml"
        self.ledger = path / "ledger.sqlite"
        """The broker's database, which `queues.readers` reads."""
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.summary_file = path / "summary.json"
        self.page = path / "report.html"
        self._lock = path / "driver.lock"
        self._replaced = path.with_name(f".{path.name}.replaced")

    @classmethod
    def of(cls, config: RunConfig) -> "RunDirectory":
        """Return the folder of a recipe's run, which need not exist."""
        return cls((config.deploy.runs_dir / config.name).absolute())

    def create(self, config: RunConfig, *, replace: bool) -> None:
        """Create the folder and store the resolved recipe in it.

        A run of the same name is replaced with `replace`, or if it ended before its first batch.

        Raises:
            InputError: A run of that name exists or is going on, or the folder cannot be written.
        """
        self.check_at_rest()
        replace = replace or self.trained_nothing()
        if self.recipe_file.exists() and not replace:
            raise InputError(
                f"a run named {config.name!r} exists in {self.path.parent}; go on with it by "
                f"`headway resume {config.name}`, choose another name (--set name=…), or delete it "
                "with --replace"
            )
        if self.path.exists() and not self.recipe_file.exists():
            raise InputError(f"{self.path} exists and is not a run folder; choose another name")
        partial = RunDirectory(self.path.with_name(f".{config.name}.partial"))
        try:
            shutil.rmtree(partial.path, ignore_errors=True)
            for folder in (partial.path, partial.checkpoints, partial.logs):
                folder.mkdir(parents=True)
            partial.recipe_file.write_text(recipe_text(config.with_model_names()))
            if replace and self.path.exists():
                shutil.rmtree(self._replaced, ignore_errors=True)
                self.path.rename(self._replaced)
            partial.path.rename(self.path)
        except OSError as error:
            shutil.rmtree(partial.path, ignore_errors=True)
            raise InputError(f"the run folder {self.path} cannot be written: {error}") from None

    def discard(self) -> None:
        """Delete the folder of a run that trained nothing, and its parent folder if now empty.

        A run that it was to replace is restored.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        if self._replaced.exists():
            self._replaced.rename(self.path)
        with suppress(OSError):
            self.path.parent.rmdir()

    def settle(self) -> None:
        """Delete the run that this one replaced, once this one has begun."""
        shutil.rmtree(self._replaced, ignore_errors=True)

    @classmethod
    def open(cls, run: str, runs_dir: Path = Path("runs")) -> "RunDirectory":
        """Find an existing run by its folder or by its name in `runs_dir`.

        Raises:
            RunMissing: There is no such run.
        """
        for path in (Path(run), runs_dir / run):
            if cls(path.absolute()).recipe_file.exists():
                return cls(path.absolute())
        names = sorted(directory.path.name for directory in cls.all(runs_dir))
        known = f"runs in {runs_dir}: {', '.join(names)}" if names else f"no runs in {runs_dir}"
        raise RunMissing(
            f"no run {run!r}: neither a run folder nor a name ({known}){nearest(run, names)}"
        )

    @classmethod
    def all(cls, runs_dir: Path) -> list["RunDirectory"]:
        """Return every run in a folder; without it, none."""
        return [cls(file.parent.absolute()) for file in runs_dir.glob("[!.]*/recipe.toml")]

    def check_at_rest(self) -> None:
        """Refuse a run that a process works on, by an InputError."""
        if not self.rests():
            raise self._going_on()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other commands out of the run during the block.

        Raises:
            InputError: Another command works on the run.
        """
        with self._lock.open("w") as file:
            for _ in range(LOCK_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOCK_SECONDS)
            else:
                raise self._going_on()
            yield

    def _going_on(self) -> InputError:
        return InputError(
            f"a run named {self.path.name!r} is going on in {self.path.parent}; choose another "
            "name, or wait for its end"
        )

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the recipe in the folder, perhaps edited since, with the present `runs_dir`.

        `overrides` are as those of `load_recipe`.

        Raises:
            InputError: The file cannot be read or is not valid, as `load_recipe`.
        """
        config = load_recipe(str(self.recipe_file), overrides)
        here = config.deploy.model_copy(update={"runs_dir": self.path.parent})
        return config.model_copy(update={"deploy": here})

    def store_recipe(self, config: RunConfig) -> None:
        """Replace the recipe in the folder."""
        with atomic_file(self.recipe_file) as file:
            file.write(recipe_text(config).encode())

    def status(self) -> str:
        """Return the run's status: "running", "done", "failed", "interrupted" or "killed".

        It is that of the summary, or "killed" if the run has not ended and no process works on it.
        """
        written = str(self.summary("status").get("status", "running"))
        return "killed" if written == "running" and self.rests() else written

    def summary(self, *keys: str) -> dict[str, Any]:
        """Return the content of `summary.json`, with some keys at least; empty if there is none.

        Raises:
            InputError: The file is damaged, or lacks one of the keys.
        """
        try:
            summary: dict[str, Any] = json.loads(self.summary_file.read_text())
            for key in keys:
                _ = summary[key]
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.summary_file} is damaged: {error!r}") from None
        return summary

    def rests(self) -> bool:
        """Return True if no process works on the run."""
        try:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except (FileNotFoundError, NotADirectoryError):
            pass
        return not is_open(self.path)

    def trained_nothing(self) -> bool:
        """Return True if there is a run that ended before it had any result to train."""
        if not self.ledger.exists():
            return self.recipe_file.exists()
        accounts = read_accounting(self.path)
        return not (accounts.ready or accounts.taken or accounts.trained)

    def append(self, name: str, rows: Iterable[Any]) -> None:
        """Append records to a JSON-lines file of the run: all of them, or none if that fails."""
        path = self.path / name
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.writelines(json.dumps(without_secrets_in(row)) + "\n" for row in rows)
        except OSError:
            with suppress(OSError):
                os.truncate(path, before)
            raise

    def rows(self, name: str, parse: Callable[[Any], Any] = lambda row: row) -> list[Any]:
        """Read the records of a JSON-lines file, without a last line that a crash cut off.

        `parse` makes an object of each record.

        Raises:
            InputError: Another line is damaged, or `parse` lacks a key of it; names the line.
        """
        path = self.path / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows += [parse(json.loads(line))] if line.endswith(b"\n") else []
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{path}, line {number} is damaged: {error!r}") from None
        return rows

    def rewrite(self, name: str, rows: Iterable[Any]) -> None:
        """Replace the records of a JSON-lines file."""
        with atomic_file(self.path / name) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json` atomically."""
        with atomic_file(self.summary_file) as file:
            file.write(json.dumps(without_secrets_in(summary), indent=2).encode())
