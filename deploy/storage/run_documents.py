"""The folder of one run, `runs/<name>/`: the paths in it, and the documents that the driver writes.

recipe.toml       the resolved recipe          metrics.jsonl   trained batches
ledger.sqlite     states, batches, accounts    swaps.jsonl     weight updates
journal/          accepted rollouts            restarts.jsonl  restarts of processes
checkpoints/      v000060/ …, or a link        recoveries.jsonl  their time away
                                               waits.jsonl     overdue waits
summary.json      figures of the run           drift.jsonl     engines that drift
scalings.jsonl    changes of actors            sessions.jsonl  recipe, program, machine
backup            link to the copy, if any     backup.claim    of a run made from its copy
logs/             output of every process      report.html     the figures as a page of plots
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from deploy.config.loader import load_recipe
from deploy.config.recipe_text import recipe_text
from deploy.config.run_config import RunConfig
from deploy.storage.jsonl import DAMAGED, append_rows, brief, read_rows, rewrite_rows
from headway.atomic_file import atomic_file
from headway.clean_text import without_secrets_in
from headway.errors import InputError

CHECKSUM = "checksum"
"""Key of `summary.json` with the checksum of the others."""


class RunDocuments:
    """Paths of a run, and the small files that the driver writes."""

    def __init__(self, path: Path) -> None:
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

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the recipe in the folder, perhaps edited since, with the present `runs_dir`."""
        config = load_recipe(str(self.recipe_file), overrides)
        return config.updated(deploy={"runs_dir": self.path.parent})

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

    def append(self, name: str, rows: Iterable[Any]) -> None:
        """Append records to a JSON-lines file of the run: all of them, or none if that fails."""
        append_rows(self.path / name, rows)

    def rewrite(self, name: str, rows: Iterable[Any]) -> None:
        """Replace the records of a JSON-lines file."""
        rewrite_rows(self.path / name, rows)


def _checksum(summary: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(summary).encode())
