"""Mends files of a run that can be made again, so that none of them keeps it from going on.

A damaged file is set aside under another name. What can still be read of it takes its place, or
what the ledger has.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from deploy.storage.jsonl import read_rows, rewrite_rows
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.open_run import open_ledger

Say = Callable[[str], None]


def set_aside(path: Path) -> Path:
    """Rename a file or folder to `aside-NAME`, or `aside-2-NAME`, …; return its new path."""
    prefixes = chain(["aside-"], (f"aside-{number}-" for number in count(2)))
    targets = (path.with_name(prefix + path.name) for prefix in prefixes)
    return path.rename(next(target for target in targets if not target.exists()))


def mend_rows(
    directory: RunDirectory, name: str, say: Say, parse: Callable[[Any], Any] = lambda row: row
) -> list[Any]:
    """Return the records of a JSON-lines file, without those that are damaged.

    `parse` makes an object of each record. The file then has the intact records alone.
    """
    path = directory.path / name
    try:
        rows = read_rows(path, parse)
    except OSError as error:
        say(f"{path} cannot be read ({error}), and is kept as {set_aside(path)}")
        return []
    if rows.damaged:
        say(
            f"{path}, line {next(iter(rows.damaged))} is damaged; {len(rows.intact)} intact records"
            f" of {rows.lines} stay, and the file as it was is kept as {set_aside(path)}"
        )
    if len(rows.intact) < rows.lines:
        rewrite_rows(path, rows.intact)
    return rows.parsed


def mend_summary(
    directory: RunDirectory, keys: Sequence[str], batches: Sequence[TrainedBatch], say: Say
) -> Mapping[str, Any]:
    """Return the summary of the earlier sessions, with some keys; empty for a new run.

    Without a summary the ledger serves: the held-out scores are collected from it again, the time
    is that from the first to the last batch of each session, and tokens count where they were
    accepted.
    """
    try:
        if summary := directory.summary(*keys):
            return summary
        if batches:
            file = directory.summary_file
            say(f"{file} is missing: its figures are made again from the ledger")
    except (InputError, OSError) as error:
        kept = set_aside(directory.summary_file)
        say(f"{error}; its figures are made again from the ledger, and the file is kept as {kept}")
    if not batches:
        return {}
    with open_ledger(directory.path, verify=False) as database:
        (tokens,) = database.execute("SELECT coalesce(sum(tokens), 0) FROM results").fetchone()
    ends = {batch.times.session_started_at: batch.times for batch in batches}
    return {
        "seconds": sum(times.published_at - begin for begin, times in ends.items()),
        "tokens_generated": tokens,
        "seconds_to_first_step": None,
        "heldout": [],
        "heldout_sampled": [],
    }
