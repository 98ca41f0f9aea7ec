"""A log of trained batches that the learner writes itself, to check the broker's ledger against.

It is written only if the environment names a file: one JSON line for every batch, after its last
optimizer step and before it is acknowledged, so a batch trained again after a rollback has several.
"""

import json
import os
import time
from collections.abc import Sequence

from queues.records import RolloutGroup

VARIABLE = "HEADWAY_TRAINED_LOG"
"""Environment variable of rank 0 that names the file to append to."""


def note_trained(groups: Sequence[RolloutGroup], version: int) -> None:
    """Append a JSON line for a batch if a log is asked for; it survives the end of the process."""
    if not (file := os.environ.get(VARIABLE)):
        return
    record = {
        "version": version,
        "at": time.time(),
        "pid": os.getpid(),
        "groups": [[group.prompt_id, group.group_id, oldest_version(group)] for group in groups],
    }
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)


def oldest_version(group: RolloutGroup) -> int | None:
    """Return the oldest policy version that sampled a token of a group; None if none was."""
    return min(
        (
            int(version)
            for rollout in group.rollouts
            for version, sampled in zip(rollout.versions, rollout.loss_mask, strict=True)
            if sampled
        ),
        default=None,
    )
