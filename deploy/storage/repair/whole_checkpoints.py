"""The checkpoint that a run goes on from, compared with its ledger and its journal.

newest committed checkpoint ─ damaged? ─▶ the one before ─▶ … ─▶ the initial weights
   └─ whole: every group that is trained again from there, or waits to be trained, is readable
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.storage.jsonl import Say, set_aside
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from headway.folder_checksums import damage_of
from queues.errors import JournalError, LedgerError
from queues.readers.checkpoints import Checkpoint, lost_groups, read_progress
from queues.storage.ledger_repair import forget_checkpoints
from queues.storage.ledger_schema import JOURNAL_NAME


class Examined(NamedTuple):
    """A committed checkpoint, compared with its checksums and the ledger."""

    version: int
    folder: Path
    damage: str | None
    """Problem of it, naming the file; None if it is whole."""


def examine(directory: RunDirectory, recorded: Sequence[Checkpoint]) -> Iterator[Examined]:
    """Yield the committed checkpoints of a run, the newest first, without those that were removed.

    `recorded` are those of the ledger, in the order of versions. The newest is never removed: if it
    is missing, that is damage. Raises InputError if the folder of all, elsewhere, is missing.
    """
    from learner.engine.checkpoint import read_state

    if not directory.checkpoints.exists() and directory.checkpoints.is_symlink():
        raise InputError(
            f"{directory.checkpoints} is a link to {directory.checkpoints.readlink()}, which is "
            "missing: mount its disk, or set the link anew"
        )
    for version, path, weights_checksum in reversed(recorded):
        folder = directory.checkpoints / path.name  # nowhere else, whatever the ledger says
        if not folder.is_dir():
            if version == recorded[-1].version:
                yield Examined(version, folder, f"{folder} is missing")
            continue
        damage = damage_of(folder)
        if damage is None:
            state = read_state(folder)
            if (state.version, state.weights_checksum) != (version, weights_checksum or ""):
                damage = (
                    f"it has version {state.version} with weights of checksum "
                    f"{state.weights_checksum!r}, and the ledger {weights_checksum!r}"
                )
        yield Examined(version, folder, damage and f"{folder}: {damage}")


def find_checkpoint(
    directory: RunDirectory, say: Say, *, is_live: bool = False
) -> tuple[int, Path] | None:
    """Return version and folder of the checkpoint to go on from; None for the initial weights.

    A damaged checkpoint is set aside, and the one before it taken. Call it while the run is held;
    the ledger of a run that `is_live` keeps damaged checkpoints, and the learner saves them anew.

    Raises LedgerError if the ledger is missing or damaged, or ends before the newest checkpoint
    does, and JournalError if a group that is needed from there on cannot be read.
    """
    if not directory.ledger.exists():
        segments = sorted((directory.path / JOURNAL_NAME).glob("*.segment"))
        if left := [*unknown_checkpoints(directory, 0), *segments]:
            raise LedgerError(
                f"{directory.ledger} is missing, but there is {left[0]}; put it back from a copy"
            )
        return None
    trained, recorded = read_progress(directory.path, verify=not is_live)
    if not is_live and (unknown := unknown_checkpoints(directory, trained)):
        raise LedgerError(
            f"{directory.ledger} ends at version {trained}, but {unknown[0]} was saved after it: a "
            "part of the ledger was lost, such as its -wal file; put it back from a copy, or "
            f"`headway salvage {directory.path}` goes back to version {trained}"
        )
    chosen: Examined | None = None
    damaged: list[Examined] = []
    for checkpoint in examine(directory, recorded):
        if checkpoint.damage is None:
            chosen = checkpoint
            break
        damaged.append(checkpoint)
    for text in give_up(directory, damaged, forget=not is_live):
        say(f"{text}; the one before is taken")
    if damaged or not is_live:
        _require_groups(directory, chosen.version if chosen else 0)
    return (chosen.version, chosen.folder) if chosen else None


def _require_groups(directory: RunDirectory, since: int) -> None:
    """Raise JournalError if a group that is trained again, or waits, cannot be read."""
    if lost := lost_groups(directory.path, since=since):
        group_id, batch, error = lost[0]
        use = "waits to be trained" if batch is None else f"is part of batch {batch}"
        others = f", and {len(lost) - 1} more groups are lost" if len(lost) > 1 else ""
        raise JournalError(
            f"{error}; it has group {group_id}, which {use}{others}; put the file back from a "
            f"copy, or `headway salvage {directory.path}` goes back to the last state that is whole"
        )


def give_up(
    directory: RunDirectory, damaged: Sequence[Examined], *, forget: bool = True
) -> Iterator[str]:
    """Set damaged checkpoints aside and `forget` them in the ledger; yield a line for each."""
    for version, folder, damage in damaged:
        kept = f", and kept as {set_aside(folder)}" if folder.exists() else ""
        yield f"checkpoint {version} is damaged: {damage}{kept}"
    if damaged and forget:
        forget_checkpoints(directory.path, [checkpoint.version for checkpoint in damaged])


def unknown_checkpoints(directory: RunDirectory, trained: int) -> list[Path]:
    """Return the folders of checkpoints later than what the ledger has, the newest first."""
    numbers = {
        int(match[1]): path
        for path in directory.checkpoints.glob("v*")
        if (match := re.fullmatch(r"v(\d+)", path.name))
    }
    return [numbers[version] for version in sorted(numbers, reverse=True) if version > trained]
