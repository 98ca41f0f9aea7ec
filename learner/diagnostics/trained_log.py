"""A log of trained batches that the learner writes itself, to check the broker's ledger against.

It is written only if the environment names a file: one JSON line for every batch, after its last
optimizer step and before it is acknowledged, so a batch trained again after a rollback has several.
"""

import json
import os
from collections.abc import Sequence

from headway import clock
from queues.records import RolloutGroup

VARIABLE = "HEADWAY_TRAINED_LOG"
"""Environment variable of rank 0 that names the file to append to."""


def note_trained(groups: Sequence[RolloutGroup], version: int) -> None:
    """Append a JSON line for a batch if a log is asked for; it survives the end of the process."""
    if not (file := os.environ.get(VARIABLE)):
        return
    record = {
        "version": version,
        "at": clock.now(),
        "pid": os.getpid(),
        "groups": [[group.prompt_id, group.group_id, oldest_version(group)] for group in groups],
    }
    with open(file, "ab", buffering=0) as log:  # whole lines, whenever the process ends
        log.write((json.dumps(record) + "\n").encode())


def oldest_version(group: RolloutGroup) -> int | None:
    """Return the oldest policy version that sampled a token of a group; None if none was."""
    tokens = ((r.versions, r.loss_mask) for r in group.rollouts)
    sampled = [v for columns in tokens for v, mask in zip(*columns, strict=True) if mask]
    return min(map(int, sampled), default=None)
