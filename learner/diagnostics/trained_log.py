"""What a learner has trained, written down by the learner itself: a witness beside the ledger.

Only where the environment names a file. A line for every batch, after its last optimizer step and
before anyone is told of it, so one that is trained again after a rollback has several. Leaves out
what is made of it: `benchmarks/reliability/chaos_oracle.py` holds the books against it.
"""

import json
import os
import time
from collections.abc import Sequence

from queues.records import RolloutGroup

VARIABLE = "HEADWAY_TRAINED_LOG"
"""In the environment of rank 0: the file to append to."""


def note_trained(groups: Sequence[RolloutGroup], version: int) -> None:
    """Appends a JSON line of a batch, if anyone asked for it; survives the end of the process.

    Args:
        groups: Of the batch.
        version: That it was trained at.
    """
    if not (file := os.environ.get(VARIABLE)):
        return
    row = {
        "version": version,
        "at": time.time(),
        "pid": os.getpid(),
        "groups": [[group.prompt_id, group.group_id, oldest_version(group)] for group in groups],
    }
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(row) + "\n").encode())
    finally:
        os.close(descriptor)


def oldest_version(group: RolloutGroup) -> int | None:
    """The oldest policy version that sampled a token of a group; None where none was sampled."""
    return min(
        (
            int(version)
            for rollout in group.rollouts
            for version, sampled in zip(rollout.versions, rollout.loss_mask, strict=True)
            if sampled
        ),
        default=None,
    )
