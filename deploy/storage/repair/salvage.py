"""`headway salvage`: takes a damaged run back to the last state that is whole.

That is a version which can be reached from a whole checkpoint, or from the initial weights, by
training recorded batches again that can all be read. Nothing is deleted: what is given up is set
aside in the run's folder, and so is a copy of its ledger.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing

from deploy.storage.jsonl import Say, mend_rows, rewrite_rows, set_aside
from deploy.storage.repair.backups import named_backup
from deploy.storage.repair.whole_checkpoints import Examined, examine, give_up, unknown_checkpoints
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import last_recipe
from headway.errors import InputError
from headway.folder_checksums import damage_of
from queues.errors import LedgerError
from queues.readers.checkpoints import LostGroup, lost_groups, read_progress
from queues.readers.open_run import open_ledger
from queues.storage.ledger_repair import go_back


def salvage(directory: RunDirectory, say: Say) -> None:
    """Take a run at rest back to the last state that is whole; say what is given up.

    Raises LedgerError if the ledger itself is damaged; it names a checkpoint that is whole.
    """
    with directory.held(), named_backup(directory):
        _salvage_recipe(directory, say)
        try:
            trained, recorded = read_progress(directory.path)
        except LedgerError as error:
            raise LedgerError(f"{error}; {_without_ledger(directory)}") from error
        for folder in unknown_checkpoints(directory, trained):
            say(f"given up: {folder}, which the ledger does not have; kept as {set_aside(folder)}")
        whole: list[Examined] = []
        damaged: list[Examined] = []
        for checkpoint in examine(directory, recorded):
            (whole if checkpoint.damage is None else damaged).append(checkpoint)
        for text in give_up(directory, damaged):
            say(f"given up: {text}")
        versions = [checkpoint.version for checkpoint in whole]
        lost = lost_groups(directory.path, since=min(versions, default=0))
        start, end = last_whole(versions, trained, lost)
        lost = [group for group in lost if group.version is None or group.version >= end]
        if lost or end < trained:
            _take_back(directory, end, trained, lost, say)
        origin = f"checkpoint {start}" if start else "the initial weights"
        say(f"{directory.path.name} is at version {end}, which {origin} leads to")


def last_whole(
    checkpoints: Sequence[int], trained: int, lost: Sequence[LostGroup]
) -> tuple[int, int]:
    """Return the version to begin with and the last version that can be reached from there.

    `checkpoints` are the versions of those that are whole. A batch of the `trained` ones can be
    trained again if none of its groups is lost.

    Example:
        >>> last_whole([2, 6], 8, [LostGroup("g9", 3, "")])
        (6, 8)
    """
    broken = {group.version for group in lost if group.version is not None}
    ends = (
        (min((v for v in broken if start <= v < trained), default=trained), start)
        for start in {0, *checkpoints}
    )
    end, start = max(ends)
    return start, end


def _take_back(
    directory: RunDirectory, end: int, trained: int, lost: Sequence[LostGroup], say: Say
) -> None:
    """Change the ledger, after a copy, and the driver's files."""
    backup = directory.ledger.with_name(f"aside-{directory.ledger.name}")
    with (
        open_ledger(directory.path, verify=False) as database,
        closing(sqlite3.connect(backup)) as copy,
    ):
        database.backup(copy)
    say(f"a copy of the ledger as it was is {backup}")
    if lost:
        say(f"lost: {lost[0].error} ({len(lost)} groups in all)")
    ids = [group.group_id for group in lost]
    batches, groups, scores = go_back(directory.path, version=end, lost=ids)
    parts = [f"batches {end} to {trained - 1}"] if batches else []
    parts.append(f"the rollouts of {groups} groups")
    parts += [f"{scores} held-out rollouts"] if scores else []
    say(f"given up: {', '.join(parts)}; all of it is sampled again")
    for name, last in (("metrics.jsonl", end - 1), ("swaps.jsonl", end)):
        file = directory.path / name
        rows = mend_rows(file, say, lambda row: (int(row["version"]), row))
        rewrite_rows(file, [row for version, row in rows if version <= last])
    try:
        summary = directory.summary("heldout", "heldout_sampled")
    except InputError:
        return  # it is made again when the run goes on
    if summary:
        kinds = {
            kind: [score for score in summary[kind] if score["version"] <= end]
            for kind in ("heldout", "heldout_sampled")
        }
        directory.write_summary({**summary, **kinds, "status": "failed"})


def _salvage_recipe(directory: RunDirectory, say: Say) -> None:
    """Write the recipe again from the ledger if it cannot be read."""
    try:
        directory.config()
    except InputError as error:
        recipe = last_recipe(directory)
        if recipe is None:
            raise
        file = directory.recipe_file
        kept = f"; kept as {set_aside(file)}" if file.exists() else ""
        directory.store_recipe(recipe)
        say(f"{file} is that of the last session again: {error}{kept}")


def _without_ledger(directory: RunDirectory) -> str:
    """Say what is left of a run whose ledger is damaged."""
    folders = sorted(directory.checkpoints.glob("v*"), reverse=True)
    text = "put it back from a copy, since nothing else has what it has"
    if whole := next((folder for folder in folders if damage_of(folder) is None), None):
        text += f". {whole} is whole: a model folder that a run of its own can begin with, as "
        text += "model.path"
    return text
