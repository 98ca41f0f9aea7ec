"""Writes the ledger of a long run, and measures how long a broker takes to open it.

    python -m tests.queues.long_ledger FOLDER 4000000

The folder is written first if it does not exist.
"""

import sys
import time
from pathlib import Path

from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.storage.ledger import Ledger

BATCH = 64
GROUPS = """
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
INSERT INTO groups SELECT n, printf('g%08d', n), printf('sums/%d/%d', n / 10000, n % 10000),
    'train', NULL, json_object('prompt_id', printf('sums/%d/%d', n / 10000, n % 10000), 'text',
        printf('%.*c %d + %d = ', 150, 'x', n, 7 * n), 'answer', 8 * n, 'metadata', json_object()),
    iif(n % 10, 'trained', 'dropped'), iif(n % 10, '', 'filtered'), NULL, 1,
    printf('engine-%d', n % 8), n / :batch, n / :batch + 2, iif(n % 10, n / :batch, NULL),
    1.7e9 + n / 5.0, 1.7e9 + n / 5.0 + 1.25, NULL, NULL FROM numbers
"""
RESULTS = """
INSERT INTO results SELECT group_id, 1, number / 1000, number % 1000 * 9000, 9000, number, 8, 1000,
    number % 9 / 8.0, start_version, start_version + 1, issued_at + 5.5, NULL FROM groups
"""
BATCHES = """
INSERT INTO batches SELECT trained_version, min(issued_at) + 6, min(issued_at) + 8,
    json_object('loss', min(issued_at) / 3, 'text', printf('%.*c', 1500, 'x'))
    FROM groups WHERE trained_version IS NOT NULL GROUP BY trained_version
"""
BATCH_GROUPS = """
INSERT INTO batch_groups SELECT trained_version, number % :batch, group_id FROM groups
    WHERE trained_version IS NOT NULL
"""


def write_long_ledger(folder, groups):
    """Write the ledger of a run that trained nine of ten groups and filtered the others."""
    ledger = Ledger(folder, synchronous="normal")
    ledger.execute("PRAGMA cache_size = -500000")
    ledger.begin()
    for statement in (GROUPS, RESULTS, BATCHES, BATCH_GROUPS):
        ledger.execute(statement, {"count": groups, "batch": BATCH})
    ledger.execute("UPDATE counters SET value = ? WHERE name = 'issued'", (groups,))
    ledger.commit()
    ledger.close()


def open_broker(folder):
    """Open the broker of such a run."""
    spec = RunSpec(groups_per_batch=BATCH, group_size=8, steps=10**9)
    return Broker(folder, config=QueuesConfig(), spec=spec)


if __name__ == "__main__":
    place, count = Path(sys.argv[1]), int(sys.argv[2])
    if not place.exists():
        write_long_ledger(place, count)
    wall, processor = time.monotonic(), time.process_time()
    open_broker(place)
    wall, processor = time.monotonic() - wall, time.process_time() - processor
    size = (place / "ledger.sqlite").stat().st_size / 1e9
    sys.stdout.write(
        f"{count:,} groups, {size:.2f} GB: {wall:.1f} s, {processor:.1f} s of processors\n"
    )
