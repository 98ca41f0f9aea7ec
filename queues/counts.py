"""What counting the rows of a ledger gives; what it means is `queues.accounts`."""

import sqlite3
from collections.abc import Mapping
from typing import NamedTuple

from queues.groups import State, StateCounts
from queues.records import Purpose


class Counts(NamedTuple):
    """What counting the rows gives."""

    states: StateCounts
    issued: int
    """Train groups, counted when they were issued."""
    duplicates: int
    in_batches: Mapping[bool, int]
    """Members of batches, by whether the batch is acknowledged."""
    trained_twice: int
    """Members of batches beyond the first time that their group is in one."""


def count_rows(database: sqlite3.Connection, *, newest: int | None = None) -> Counts:
    """Count the rows of a ledger; in one transaction where consistency matters.

    Args:
        database: The ledger.
        newest: Look only among the groups of this batch for those that are trained twice, since
            others were looked at before. None: look at all.
    """
    states = {
        (Purpose(purpose), State(state), reason): count
        for purpose, state, reason, count in database.execute(
            "SELECT purpose, state, reason, count(*) FROM groups GROUP BY purpose, state, reason"
        )
    }
    counters = dict(database.execute("SELECT name, value FROM counters").fetchall())
    (members,) = database.execute("SELECT count(*) FROM batch_groups").fetchone()
    (in_training,) = database.execute(
        "SELECT count(*) FROM batch_groups"
        " WHERE version IN (SELECT version FROM batches WHERE acked_at IS NULL)"
    ).fetchone()
    if newest is None:
        again = "SELECT count(*) - count(DISTINCT group_id) FROM batch_groups"
    else:
        again = (
            "SELECT count(*) FROM batch_groups AS new JOIN batch_groups AS old USING (group_id)"
            " WHERE new.version = :newest"
            " AND (old.version, old.position) < (new.version, new.position)"
        )
    (trained_twice,) = database.execute(again, {"newest": newest}).fetchone()
    return Counts(
        states=states,
        issued=counters["issued"],
        duplicates=counters["duplicates"],
        in_batches={False: in_training, True: members - in_training},
        trained_twice=trained_twice,
    )
