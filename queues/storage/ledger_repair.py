"""Changes the ledger of a run at rest: an earlier version, forgotten checkpoints, prompts again.

The functions raise LedgerError if a broker works on the run or its ledger cannot be read.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headway.errors import InputError
from queues.storage.ledger import DROPPED_SINCE_TAKE, Ledger
from queues.storage.ledger_schema import FILE_NAME, SESSION, sessions_of

_OF_LATER_VERSIONS = (
    "SELECT group_id FROM groups LEFT JOIN results USING (group_id) WHERE"
    " (purpose = 'train' AND"
    " (state IN ('leased', 'ready', 'taken') OR trained_version >= :version))"
    " OR (purpose = 'evaluate' AND newest_version > :version)"
)
_BATCHES = (
    "SELECT version FROM batches WHERE version >= :version AND (:all OR version IN"
    " (SELECT version FROM batch_groups WHERE group_id IN (SELECT value FROM json_each(:ids))))"
)
_FAILED = (
    "purpose = 'train' AND state = 'failed'"
    " AND (:all OR prompt_id IN (SELECT value FROM json_each(:ids)))"
)
_GIVEN_UP = "group_id IN (SELECT value FROM json_each(:ids))"
_STATEMENTS = (
    f"UPDATE groups SET state = 'ready' WHERE state = 'taken' AND group_id IN"
    f" (SELECT group_id FROM batch_groups WHERE version IN ({_BATCHES}))",
    f"CREATE TEMP TABLE removed AS {_BATCHES}",
    "DELETE FROM batch_groups WHERE version IN (SELECT version FROM removed)",
    "DELETE FROM batches WHERE version IN (SELECT version FROM removed)",
    f"DELETE FROM results WHERE {_GIVEN_UP}",
    f"DELETE FROM retired WHERE {_GIVEN_UP}",
    f"DELETE FROM partials WHERE :all OR {_GIVEN_UP}",
    f"DELETE FROM notes WHERE :all OR {_GIVEN_UP}",
    f"UPDATE groups SET state = 'queued', start_version = NULL, deadline_version = NULL,"
    f" trained_version = NULL WHERE {_GIVEN_UP}",
    "DELETE FROM checkpoints WHERE version > :version",
    f"UPDATE counters SET value = 0 WHERE :all AND name = '{DROPPED_SINCE_TAKE}'",
)


class GivenUp(NamedTuple):
    """The results that a run lost by `go_back`; they are sampled again."""

    batches: int
    """Trained batches."""
    groups: int
    """Groups of accepted rollouts, those of the batches included."""
    scores: int
    """Held-out rollouts."""


def go_back(run_directory: Path, *, version: int, lost: Collection[str] = ()) -> GivenUp:
    """Make a version the newest of a run, and queue the groups whose results are given up.

    If later batches were trained, these are all results that are not trained by then and all
    held-out scores of later versions: weights that will never be again may have sampled them.
    Otherwise they are those of the groups `lost`; a batch that one of these was taken for is
    composed anew.
    """
    with _changed(run_directory) as ledger:
        (batches,) = ledger.execute(
            "SELECT count(*) FROM batches WHERE acked_at IS NOT NULL AND version >= ?", (version,)
        ).fetchone()
        if batches:
            rows = ledger.execute(_OF_LATER_VERSIONS, {"version": version})
            lost = [group_id for (group_id,) in rows]
        values = {"version": version, "all": bool(batches), "ids": json.dumps([*lost])}
        counts = dict(
            ledger.execute(
                "SELECT purpose, count(*) FROM results JOIN groups USING (group_id)"
                f" WHERE {_GIVEN_UP} GROUP BY purpose",
                values,
            ).fetchall()
        )
        for statement in _STATEMENTS:
            ledger.execute(statement, values)
        for number, session in enumerate(sessions_of(ledger.database)):
            begun = json.dumps({**session, "version": min(session["version"], version)})
            ledger.execute(
                "UPDATE meta SET value = ? WHERE key = ?", (begun, f"{SESSION}{number:06d}")
            )
    return GivenUp(batches, counts.get("train", 0), counts.get("evaluate", 0))


def forget_checkpoints(run_directory: Path, versions: Iterable[int]) -> None:
    """Remove checkpoints of a run from its ledger."""
    with _changed(run_directory) as ledger:
        ledger.database.executemany(
            "DELETE FROM checkpoints WHERE version = ?", [(version,) for version in versions]
        )


def requeue(run_directory: Path, prompt_ids: Collection[str] | None = None) -> list[str]:
    """Queue the failed train groups of a run again; return the ids of their prompts.

    Those of some prompts, or of all with None. The next session leases them first, with as many
    attempts as a new group has, and then goes on with the source.

    Raises:
        InputError: There is no such run, or a prompt has not failed in it.
    """
    if not (run_directory / FILE_NAME).is_file():
        raise InputError(f"{run_directory}: no {FILE_NAME} here, so it is not the folder of a run")
    with _changed(run_directory) as ledger:
        values = {"all": prompt_ids is None, "ids": json.dumps([*(prompt_ids or ())])}
        failed = f"SELECT prompt_id FROM groups WHERE {_FAILED} ORDER BY number"
        queued = [prompt_id for (prompt_id,) in ledger.execute(failed, values)]
        ledger.execute(f"UPDATE groups SET state = 'queued', reason = '' WHERE {_FAILED}", values)
        if queued:  # the source may have ended since all of its prompts had failed
            ledger.forget("ended")
        if missing := sorted(set(prompt_ids or ()) - set(queued)):
            raise InputError(f"prompt {missing[0]!r} has not failed in this run")
    return queued


@contextmanager
def _changed(run_directory: Path) -> Iterator[Ledger]:
    """Yield the ledger of a run, and commit at the end of the block what that has changed."""
    ledger = Ledger(run_directory, synchronous="full")
    try:
        ledger.begin()
        yield ledger
        ledger.commit()
    finally:
        ledger.rollback()
        ledger.close()
