"""Puts failed prompts of a run at rest back into its queue."""

from collections.abc import Collection
from pathlib import Path

from headway.errors import InputError
from queues.storage.ledger import Ledger
from queues.storage.ledger_schema import FILE_NAME


def requeue(run_directory: Path, prompt_ids: Collection[str] | None = None) -> list[str]:
    """Queue the failed train groups of a run again; return the ids of their prompts.

    Those of some prompts, or of all with None. The next session leases them first, with as many
    attempts as a new group has.

    Raises:
        InputError: There is no such run, or a prompt has not failed in it.
        LedgerError: A broker works on the run, or its ledger cannot be read.
    """
    if not (run_directory / FILE_NAME).is_file():
        raise InputError(f"{run_directory}: no {FILE_NAME} here, so it is not the folder of a run")
    ledger = Ledger(run_directory, synchronous="full")
    try:
        ledger.begin()
        queued = ledger.requeue_failed(prompt_ids)
        if missing := sorted(set(prompt_ids or ()) - set(queued)):
            ledger.rollback()
            raise InputError(f"prompt {missing[0]!r} has not failed in this run")
        ledger.commit()
    finally:
        ledger.close()
    return queued
