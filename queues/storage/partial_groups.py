"""Sampled tokens of groups that have no result yet: saved by a worker, carried by the next lease.

    worker ─save▶ │ oldest version: in the group │ ─lease: does it still fit?─▶ worker continues
                  │ payload: in the ledger       │        └─ no: it samples afresh

A group that is continued starts at its oldest saved token (s in `queues.policy.admission`). A
payload is a group of `queues.schema` whose unfinished rollouts are `aborted`. It is deleted when
the group has its result.
"""

import sqlite3
from collections.abc import Iterable


class PartialGroups:
    """The table `partials` of the ledger; used in its thread and inside its transactions."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        rows = database.execute("SELECT group_id FROM partials")
        self._saved = {group_id for (group_id,) in rows}
        """Groups that may have a payload; most have none, and cost no query."""

    def save(self, group_id: str, oldest_version: int, payload: bytes) -> None:
        """Save the tokens of a group, replacing earlier ones."""
        self._saved.add(group_id)
        self._database.execute(
            "INSERT OR REPLACE INTO partials VALUES (?, ?, ?)", (group_id, oldest_version, payload)
        )

    def forget(self, group_id: str) -> None:
        """Delete the tokens of a group that has its result, or never will."""
        if group_id in self._saved:
            self._database.execute("DELETE FROM partials WHERE group_id = ?", (group_id,))

    def read(self, group_ids: Iterable[str]) -> dict[str, bytes]:
        """Return the payloads of those groups that have one."""
        select = "SELECT payload FROM partials WHERE group_id = ?"
        rows = {x: self._database.execute(select, (x,)).fetchone() for x in group_ids}
        return {group_id: row[0] for group_id, row in rows.items() if row is not None}

    def oldest(self) -> dict[str, int]:
        """Return the oldest saved version of every group that has a payload."""
        return dict(self._database.execute("SELECT group_id, oldest_version FROM partials"))
