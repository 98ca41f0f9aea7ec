"""What a broker goes on from, read from the tables of the ledger in one go."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from queues.records import Purpose
from queues.state.groups import FINAL, OVERDUE, State, StateCounts

Row = sqlite3.Row


class Snapshot(NamedTuple):
    """What a broker needs to go on where the last one stopped."""

    groups: Sequence[Row]
    """Those not in a final state, in the order of their issue, with `accepted_at` and `batch`."""
    finished: StateCounts
    evaluations: Sequence[Row]
    """With their `scored`, `failed`, `rewards`, `tokens`, `lowest_version`, `highest_version`."""
    best: Sequence[tuple[str, str, float]]
    """Of every prompt of an evaluation that was scored: the name of that, its id, its best reward.
    """
    incomplete: Sequence[tuple[str, str]]
    """Of every prompt of an evaluation of which a sample failed: the name of that, its id."""
    batches: Sequence[Row]
    meta: Mapping[str, str]
    counters: Mapping[str, int]
    retired: Sequence[str]
    """Names of prompts that are not issued again since they are mastered."""
    poisonous: Sequence[str]
    """Ids of prompts whose attempts all failed."""
    issued_anew: Sequence[str]
    """Ids of prompts of which a group was dropped for being overdue."""
    accepted: int
    """Results."""
    late: int
    """Groups that were taken after their deadline."""
    next_number: int


def read_snapshot(database: sqlite3.Connection, states: StateCounts) -> Snapshot:
    """Everything that a new broker needs, but for the counted `states`, which are given."""

    def number(sql: str) -> int:
        found: int = database.execute(sql).fetchone()[0]
        return found

    def prompts(where: str) -> list[str]:
        rows = database.execute(
            f"SELECT prompt_id FROM groups WHERE purpose = ? AND {where}", (Purpose.TRAIN,)
        )
        return [prompt_id for (prompt_id,) in rows]

    final = ", ".join(f"'{state}'" for state in FINAL)
    groups = database.execute(
        "SELECT groups.*, accepted_at, version AS batch FROM groups"
        " LEFT JOIN results USING (group_id) LEFT JOIN batch_groups USING (group_id)"
        f" WHERE state NOT IN ({final}) ORDER BY batch, position, number"
    )
    evaluations = database.execute(
        "SELECT evaluations.*, count(accepted_at) AS scored, sum(state = 'failed') AS failed,"
        " sum(reward) AS rewards, sum(tokens) AS tokens,"
        " min(oldest_version) AS lowest_version, max(newest_version) AS highest_version"
        " FROM evaluations JOIN groups ON evaluation = name LEFT JOIN results USING (group_id)"
        " GROUP BY name ORDER BY min(number)"
    )
    return Snapshot(
        groups=groups.fetchall(),
        finished={key: n for key, n in states.items() if key[1] in FINAL},
        evaluations=evaluations.fetchall(),
        best=database.execute(
            "SELECT evaluation, groups.prompt_id, max(reward) FROM groups"
            " JOIN results USING (group_id) WHERE evaluation IS NOT NULL"
            " GROUP BY evaluation, groups.prompt_id"
        ).fetchall(),
        incomplete=database.execute(
            "SELECT DISTINCT evaluation, prompt_id FROM groups"
            f" WHERE evaluation IS NOT NULL AND state = '{State.FAILED}'"
        ).fetchall(),
        batches=database.execute("SELECT * FROM batches ORDER BY version").fetchall(),
        meta=dict(database.execute("SELECT key, value FROM meta").fetchall()),
        counters=dict(database.execute("SELECT name, value FROM counters").fetchall()),
        retired=[name for (name,) in database.execute("SELECT prompt FROM retired")],
        poisonous=prompts(f"state = '{State.FAILED}'"),
        issued_anew=prompts(f"state = '{State.DROPPED}' AND reason = '{OVERDUE}'"),
        accepted=number("SELECT count(*) FROM results"),
        late=number(
            "SELECT count(*) FROM groups JOIN batch_groups USING (group_id)"
            " WHERE deadline_version < version"
        ),
        next_number=number("SELECT coalesce(max(number), 0) FROM groups") + 1,
    )
