"""The folder of one run, `runs/<name>/`: its paths, its documents, its lock, and its creation.

`deploy/docs/running.md` lists its files. A new folder is made as `.NAME.partial` and renamed. A run
that it replaces is kept as `.NAME.replaced` until the new one has trained something or is no longer
to be undone.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from deploy.config.devices import dtypes_here
from deploy.config.loader import load_recipe
from deploy.config.recipe_text import recipe_text
from deploy.config.run_config import RunConfig
from deploy.runtime.signals import deferred
from deploy.storage.jsonl import DAMAGED, brief, read_rows
from deploy.storage.run_lock import RunLock, RunMissing
from headway.atomic_file import atomic_file, sync_path
from headway.clean_text import without_secrets_in
from headway.errors import InputError, is_bad_input
from headway.file_lock import is_at
from headway.nearest_name import nearest
from queues.errors import LedgerError
from queues.readers.accounting import read_accounting
from queues.storage.backup import is_taken_over

CHECKSUM = "checksum"
"""Key of `summary.json` with the checksum of the others."""


class RunDirectory:
    """The folder of one run: its documents, its lock, and its creation."""

    def __init__(self, path: Path) -> None:
        self.lock = RunLock(path)
        self.path = path
        self.recipe_file = path / "recipe.toml"
        self.ledger = path / "ledger.sqlite"
        """The broker's database, which `queues.readers` reads."""
        self.checkpoints = path / "checkpoints"
        self.backup = path / "backup"
        """A link to the copy on shared storage, if there is one (`queues.storage.backup`)."""
        self.logs = path / "logs"
        self.summary_file = path / "summary.json"
        self.page = path / "report.html"

    @classmethod
    def of(cls, config: RunConfig) -> "RunDirectory":
        """Return the folder of a recipe's run, which need not exist."""
        return cls((config.deploy.runs_dir / config.name).absolute())

    @classmethod
    def open(
        cls, run: str, runs_dir: Path = Path("runs"), *, without_recipe: bool = False
    ) -> "RunDirectory":
        """Find an existing run by its folder or by its name in `runs_dir`.

        Raises RunMissing if there is none, and InputError without a recipe, unless it may be so.
        """
        for path in (Path(run), runs_dir / run):
            directory = cls(path.absolute())
            if directory.recipe_file.exists() or (without_recipe and directory.ledger.exists()):
                return directory
            if directory.ledger.exists():
                raise InputError(
                    f"{directory.recipe_file} is missing; put it back from a copy, or `headway "
                    f"salvage {path}` writes it again from the ledger"
                )
        names = sorted(directory.path.name for directory in cls.all(runs_dir))
        known = f"runs in {runs_dir}: {', '.join(names)}" if names else f"no runs in {runs_dir}"
        raise RunMissing(
            f"no run {run!r}: neither a run folder nor a name ({known}){nearest(run, names)}"
        )

    @classmethod
    def all(cls, runs_dir: Path) -> list["RunDirectory"]:
        """Return every run in a folder; without it, none."""
        return [cls(file.parent.absolute()) for file in runs_dir.glob("[!.]*/recipe.toml")]

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the recipe in the folder, perhaps edited since, with the present `runs_dir`."""
        config = load_recipe(str(self.recipe_file), overrides)
        dtypes = dtypes_here(config, on_gpu=config.learner.gpus > 0)  # "auto" was set since
        return config.updated(deploy={"runs_dir": self.path.parent}, **dtypes)

    def store_recipe(self, config: RunConfig) -> None:
        """Replace the recipe in the folder."""
        with atomic_file(self.recipe_file, durable=True) as file:
            file.write(recipe_text(config).encode())

    def summary(self, *keys: str) -> dict[str, Any]:
        """Return the content of `summary.json`; empty if there is none.

        Raises InputError if it is damaged, or lacks one of the keys.
        """
        try:
            summary: dict[str, Any] = json.loads(self.summary_file.read_bytes())
            recorded = summary.pop(CHECKSUM, None)
            if recorded not in (None, _checksum(summary)):
                raise ValueError(f"its {CHECKSUM} is another")
            for key in keys:
                _ = summary[key]
        except FileNotFoundError:
            return {}
        except DAMAGED as error:
            raise InputError(f"{self.summary_file} is damaged: {brief(error)}") from None
        return summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json` atomically, with a checksum of its content."""
        clean = without_secrets_in(summary)
        content = {**clean, CHECKSUM: _checksum(clean)}
        with atomic_file(self.summary_file, durable=True) as file:
            file.write(json.dumps(content, indent=2).encode())

    def rows(self, name: str, parse: Callable[[Any], Any] = lambda row: row) -> list[Any]:
        """Return the records of a JSON-lines file, without a last line that a crash cut off.

        `parse` makes an object of each. Raises InputError that names another line which is damaged.
        """
        rows = read_rows(self.path / name, parse)
        if rows.damaged:
            number, problem = next(iter(rows.damaged.items()))
            raise InputError(f"{self.path / name}, line {number} is damaged: {problem}")
        return rows.parsed

    def status(self) -> str:
        """Return the run's status: "running", "done", "failed", "interrupted" or "killed".

        It is that of the summary, or "killed" if the run has not ended and no process works on it.
        """
        written = str(self.summary("status").get("status", "running"))
        return "killed" if written == "running" and self.lock.rests() else written

    def trained_nothing(self) -> bool:
        """Return True if there is a run that ended before it had any result to train."""
        if not self.ledger.exists():
            return self.recipe_file.exists()
        accounts = read_accounting(self.path)
        return not (accounts.ready or accounts.taken or accounts.trained)

    @contextmanager
    def held(
        self, end_leftovers: Callable[[Path], None] | None = None, *, is_again: bool = False
    ) -> Iterator[None]:
        """Hold the run as `RunLock.held` does; what it has replaced does not come back any more."""
        with self.lock.held(end_leftovers, is_again=is_again):
            _delete(self._beside("replaced"))  # that of a run whose first session was killed
            yield

    @contextmanager
    def created(self, config: RunConfig, *, replace: bool) -> Iterator[None]:
        """Create the folder with the resolved recipe in it, and hold it during the block.

        A run of the same name is replaced with `replace`, or if it ended before its first batch.
        If the block ends by an InputError before anything is trained, the folder is deleted, with
        its parent folder if that is then empty, and a run that it was to replace is restored.

        Raises InputError if such a run exists or is going on, or the folder cannot be written.
        """
        descriptor: int | None = None
        with ExitStack() as hold:
            try:
                with deferred():
                    descriptor = self._create(config, hold, replace=replace)
            except KeyboardInterrupt:
                if descriptor is not None:
                    self._discard(descriptor)
                raise
            try:
                yield
            except BaseException as error:
                if is_bad_input(error) and self.trained_nothing():
                    self._discard(descriptor)
                raise
            finally:
                _delete(self._beside("replaced"))

    def _create(self, config: RunConfig, hold: ExitStack, *, replace: bool) -> int:
        """Create the folder, and return the descriptor of its lock, which `hold` keeps."""
        partial, replaced = RunDirectory(self._beside("partial")), self._beside("replaced")
        with ExitStack() as free:
            try:
                free.enter_context(self.lock.named())
                self._restore()  # after a kill
                if self.path.exists():
                    self._check_replaceable(free, replace=replace)
                _delete(partial.path)
                partial._fill(config)
                descriptor = hold.enter_context(partial.lock.taken())
                if self.path.exists():
                    _delete(replaced)
                    self.path.rename(replaced)
                partial.path.rename(self.path)
                sync_path(self.path.parent)
            except BlockingIOError:
                raise self.lock.going_on(by_signer=True) from None
            except OSError as error:
                self._restore()
                _delete(partial.path)
                raise InputError(f"the run folder {self.path} cannot be written: {error}") from None
        return descriptor

    def _fill(self, config: RunConfig) -> None:
        """Make the folder with its recipe, and those of checkpoints and backup where they go."""
        mode = 0o700 if config.deploy.private else 0o777
        self.path.mkdir(mode)
        saved, apart = self.checkpoints, config.deploy.checkpoint_dir
        unique = f"{config.name}-{secrets.token_hex(4)}"
        if (backups := config.deploy.backup_dir) is not None:
            backups.mkdir(parents=True, exist_ok=True)
            (backup := backups.absolute() / unique).mkdir(mode)
            self.backup.symlink_to(backup)
            saved = backup / "checkpoints"
        if apart is not None:
            apart.mkdir(parents=True, exist_ok=True)
            saved = apart.absolute() / unique
        if saved != self.checkpoints:
            self.checkpoints.symlink_to(saved)
        for folder in (saved, self.logs):
            folder.mkdir(mode)
        self.store_recipe(config.with_model_names())

    def _beside(self, state: str) -> Path:
        """Return the path of the folder in another state: partial, replaced or discarded."""
        return self.path.with_name(f".{self.path.name}.{state}")

    def _restore(self) -> None:
        """Put the run that was to be replaced back where it was, if nothing is there."""
        if (replaced := self._beside("replaced")).exists() and not self.path.exists():
            replaced.rename(self.path)

    def _check_replaceable(self, free: ExitStack, *, replace: bool) -> None:
        """Refuse a folder that may not be replaced; `free` holds the run in it meanwhile."""
        if not self.recipe_file.exists():
            raise InputError(f"{self.path} exists and is not a run folder; choose another name")
        free.enter_context(self.held())
        if not (replace or self.trained_nothing()):
            raise InputError(
                f"a run named {self.path.name!r} exists in {self.path.parent}; go on with it by "
                f"`headway resume {self.path.name}`, choose another name (--set name=…), or delete "
                "it with --replace"
            )

    def _discard(self, descriptor: int) -> None:
        """Delete the folder whose lock is open, if it is still here; restore what it replaced."""
        doomed = self._beside("discarded")
        with deferred():
            with self.lock.named():
                if not is_at(descriptor, self.lock.file):
                    return
                _delete(doomed)
                self.path.rename(doomed)
                self._restore()
            _delete(doomed)
            with suppress(OSError):
                self.path.parent.rmdir()


def _delete(folder: Path) -> None:
    """Delete the folder of a run, and its checkpoints and its backup where they are elsewhere.

    These stay if the run went on elsewhere, or if that cannot be read.
    """
    links = [link for link in (folder / "checkpoints", folder / "backup") if link.is_symlink()]
    with suppress(LedgerError, OSError):
        if not is_taken_over(folder, folder / "backup"):
            for target in [link.resolve() for link in links]:
                shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _checksum(summary: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(summary).encode())
