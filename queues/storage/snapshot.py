"""The content of a ledger from which a broker continues."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from queues.records import Purpose
from queues.state.groups import FINAL, OVERDUE, State, StateCounts

Row = sqlite3.Row


class Snapshot(NamedTuple):
    """Everything that a broker needs to continue where the last one stopped."""

    groups: Sequence[Row]
    """Groups not in a final state, taken groups first, then by issue, with `accepted_at` and
    `batch`."""
    finished: StateCounts
    evaluations: Sequence[Row]
    """Columns are the fields of `EvaluationRun`, less `best` and `incomplete`."""
    best: Sequence[tuple[str, str, float]]
    """Evaluation, prompt id and largest reward of every scored prompt."""
    incomplete: Sequence[tuple[str, str]]
    """Evaluation and prompt id of every prompt of which a sample failed."""
    batches: Sequence[Row]
    meta: Mapping[str, str]
    counters: Mapping[str, int]
    retired: Sequence[str]
    """Names of the prompts that are not issued again since they are mastered."""
    failed_prompts: Sequence[str]
    """Ids of the train prompts whose attempts all failed."""
    issued_anew: Sequence[str]
    """Ids of the prompts of overdue groups that were dropped."""
    accepted: int
    """Number of results."""
    late: int
    """Number of groups that were taken after their deadline."""
    next_number: int


def read_snapshot(database: sqlite3.Connection, states: StateCounts) -> Snapshot:
    """Read the snapshot; `states` are the counted groups."""

    def number(sql: str) -> int:
        value: int = database.execute(sql).fetchone()[0]
        return value

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
        failed_prompts=prompts(f"state = '{State.FAILED}'"),
        issued_anew=prompts(f"state = '{State.DROPPED}' AND reason = '{OVERDUE}'"),
        accepted=number("SELECT count(*) FROM results"),
        late=number(
            "SELECT count(*) FROM groups JOIN batch_groups USING (group_id)"
            " WHERE deadline_version < version"
        ),
        next_number=number("SELECT coalesce(max(number), 0) FROM groups") + 1,
    )
