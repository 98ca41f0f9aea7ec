"""Counts of the rows of a ledger; `queues.readers.accounting` interprets them.

`count_rows` reads every row, so its time grows with the run. An acknowledgement calls
`kept_counts`, which triggers keep up to date in the same transactions as the rows; they are counted
anew whenever a broker opens the ledger.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from queues.records import Purpose
from queues.state.groups import State, StateCounts

_STATES = "SELECT purpose, state, reason, count(*) FROM groups GROUP BY purpose, state, reason"
_MEMBERS = "SELECT count(*) FROM batch_groups"
_ENTER = (
    "INSERT INTO kept_states VALUES (new.purpose, new.state, new.reason, 1)"
    " ON CONFLICT DO UPDATE SET value = value + 1"
)
_LEAVE = (
    "UPDATE kept_states SET value = value - 1"
    " WHERE (purpose, state, reason) = (old.purpose, old.state, old.reason)"
)
_TRIGGERS = {
    "kept_on_group_insert": f"AFTER INSERT ON groups BEGIN {_ENTER}; END",
    "kept_on_group_update": f"AFTER UPDATE OF purpose, state, reason ON groups"
    f" BEGIN {_LEAVE}; {_ENTER}; END",
    "kept_on_group_delete": f"AFTER DELETE ON groups BEGIN {_LEAVE}; END",
    "kept_on_member_insert": "AFTER INSERT ON batch_groups"
    " BEGIN UPDATE kept_members SET value = value + 1; END",
    "kept_on_member_delete": "AFTER DELETE ON batch_groups"
    " BEGIN UPDATE kept_members SET value = value - 1; END",
}
_ANEW = "".join(
    f"DROP TRIGGER IF EXISTS {name}; CREATE TRIGGER {name} {body};"
    for name, body in _TRIGGERS.items()
)
_KEEP = f"""
CREATE TABLE IF NOT EXISTS kept_states (    -- rows of groups
    purpose TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (purpose, state, reason)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kept_members (value INTEGER NOT NULL) STRICT; -- rows of batch_groups
CREATE INDEX IF NOT EXISTS batches_in_training ON batches (version) WHERE acked_at IS NULL;
{_ANEW}
DELETE FROM kept_states;
DELETE FROM kept_members;
INSERT INTO kept_states {_STATES};
INSERT INTO kept_members {_MEMBERS};
"""


class Counts(NamedTuple):
    """The counts of a ledger."""

    states: StateCounts
    issued: int
    """Train groups, counted when they are issued."""
    duplicates: int
    in_batches: Mapping[bool, int]
    """Members of batches; True: of acknowledged batches, False: of batches in training."""
    trained_twice: int
    """Members of batches beyond the first of their group."""


def count_rows(database: sqlite3.Connection) -> Counts:
    """Count the rows of a ledger; in one transaction where consistency matters."""
    (trained_twice,) = database.execute(
        "SELECT count(*) - count(DISTINCT group_id) FROM batch_groups"
    ).fetchone()
    return _counts(database, database.execute(_STATES), _MEMBERS, trained_twice)


def keep_counts(database: sqlite3.Connection) -> None:
    """Count the rows of a ledger that is opened for writing, and keep the counts from then on."""
    database.executescript(f"BEGIN IMMEDIATE; {_KEEP} COMMIT;")


def kept_counts(database: sqlite3.Connection, *, newest: int) -> Counts:
    """Return what `count_rows` would, from the kept counts.

    Only groups of the `newest` batch are checked for being trained twice; others were before.
    """
    (trained_twice,) = database.execute(
        "SELECT count(*) FROM batch_groups AS new JOIN batch_groups AS old USING (group_id)"
        " WHERE new.version = ? AND (old.version, old.position) < (new.version, new.position)",
        (newest,),
    ).fetchone()
    states = database.execute("SELECT purpose, state, reason, value FROM kept_states WHERE value")
    return _counts(database, states, "SELECT value FROM kept_members", trained_twice)


def _counts(
    database: sqlite3.Connection,
    states: Iterable[tuple[str, str, str, int]],
    members: str,
    trained_twice: int,
) -> Counts:
    """Return the counts from the rows of `states` and the result of the query `members`."""
    counters = dict(database.execute("SELECT name, value FROM counters").fetchall())
    (in_any,) = database.execute(members).fetchone()
    (in_training,) = database.execute(
        "SELECT count(*) FROM batch_groups"
        " WHERE version IN (SELECT version FROM batches WHERE acked_at IS NULL)"
    ).fetchone()
    return Counts(
        states={
            (Purpose(purpose), State(state), reason): count
            for purpose, state, reason, count in states
        },
        issued=counters["issued"],
        duplicates=counters["duplicates"],
        in_batches={False: in_training, True: in_any - in_training},
        trained_twice=trained_twice,
    )
