"""Tokens of groups that have no result yet: saved by their worker, carried by their next lease.

    worker ─save▶ │ oldest version: in the group │ ─lease: does it still fit?─▶ worker goes on
                  │ payload: in the ledger       │        └─ no: it samples afresh

A group that goes on starts at its oldest saved token (s in `queues.policy.admission`), so its
deadline may be earlier than the engine's version alone would give; saved tokens whose group would
not fit that way are left. A payload is a group of `queues.schema` with the rollouts that there are:
finished ones, and some without an end (`aborted`). It goes when the group has its result.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from queues.policy.admission import Bounds, leases_allowed

_TABLE = """
CREATE TABLE IF NOT EXISTS partials (       -- at most one for a group without a result
    group_id TEXT PRIMARY KEY REFERENCES groups (group_id),
    oldest_version INTEGER NOT NULL,
    payload BLOB NOT NULL
) STRICT, WITHOUT ROWID;
"""


class PartialGroups:
    """A table of the ledger; for its thread and inside its transactions, as `Ledger` itself."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.executescript(_TABLE)
        self._held = {group_id for (group_id,) in database.execute("SELECT group_id FROM partials")}
        """Groups that may have a payload: most never have, and are not asked for."""

    def save(self, group_id: str, oldest_version: int, payload: bytes) -> None:
        """Keep what there is of a group, in the place of what there was."""
        self._held.add(group_id)
        self._database.execute(
            "INSERT OR REPLACE INTO partials VALUES (?, ?, ?)", (group_id, oldest_version, payload)
        )

    def forget(self, group_id: str) -> None:
        """The group has its result, or never will."""
        if group_id in self._held:
            self._database.execute("DELETE FROM partials WHERE group_id = ?", (group_id,))

    def read(self, group_ids: Iterable[str]) -> dict[str, bytes]:
        """Payloads by group, of those that have one."""
        found = {}
        for group_id in group_ids:
            row = self._database.execute(
                "SELECT payload FROM partials WHERE group_id = ?", (group_id,)
            ).fetchone()
            if row is not None:
                found[group_id] = row[0]
        return found

    def oldest(self) -> dict[str, int]:
        """The oldest saved version of every group that has a payload."""
        return dict(self._database.execute("SELECT group_id, oldest_version FROM partials"))


def fits(
    due: Mapping[int, int],
    *,
    saved_version: int,
    others: int,
    version: int,
    engine_version: int,
    bounds: Bounds,
    overdue: int = 0,
) -> bool:
    """Whether rule 1 of `queues.policy.admission` lets a group go on with its saved tokens.

    Args:
        due: Number of live groups by the date that they are due.
        saved_version: Of its oldest saved token.
        others: Groups that are leased after it at the same time, from the engine's version.
        version: v, the learner's.
        engine_version: That the engine serves.
        bounds: The run's, within the window of staleness.
        overdue: Number of live groups that are not in `due`, since they are overdue.
    """
    start = min(saved_version, engine_version)
    allowed = partial(leases_allowed, version=version, bounds=bounds, overdue=overdue)
    if not allowed(due, start_version=start):
        return False
    with_it = Counter(due)
    with_it[bounds.deadline(start)] += 1
    return allowed(with_it, start_version=engine_version) >= others
