"""The outcome of a finished evaluation, read from the rows of its samples."""

import sqlite3

from queues.records import Evaluation, Purpose

_OUTCOME = f"""
WITH prompts AS (
    SELECT count(*) AS samples, sum(state = 'failed') AS failures, count(reward) AS scored,
        sum(reward) AS total, max(reward) AS largest, min(oldest_version) AS oldest,
        max(newest_version) AS newest
    FROM groups LEFT JOIN results USING (group_id)
    WHERE purpose = '{Purpose.EVALUATE}' AND evaluation = ? GROUP BY prompt_id
)
SELECT sum(samples) AS count, sum(failures) AS failed, sum(total) / sum(scored) AS score,
    avg(iif(failures, NULL, largest)) AS best, sum(failures > 0) AS incomplete,
    min(oldest) AS lowest_version, max(newest) AS highest_version
FROM prompts
"""


def read_evaluation(database: sqlite3.Connection, name: str) -> Evaluation:
    """Return the outcome of a finished evaluation of an open ledger."""
    cursor = database.execute(_OUTCOME, (name,))
    columns = [column for column, *_ in cursor.description]
    return Evaluation(**dict(zip(columns, cursor.fetchone(), strict=True)))
