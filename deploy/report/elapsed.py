"""The time in which a run trained, without the pauses between its sessions."""

from collections.abc import Sequence
from itertools import pairwise

from learner.diagnostics.batch_report import TrainedBatch


def version_seconds(batches: Sequence[TrainedBatch]) -> dict[int, float]:
    """Return when each version was made, in seconds since the learner first waited for a batch.

    The time from the last step of a session to the first wait of the next does not count. A batch
    whose record is missing counts with the next one.
    """
    seconds: dict[int, float] = {}
    passed, before = 0.0, None
    for batch in batches:
        times = batch.times
        seconds.setdefault(batch.version, passed)
        begun = times.wait_started_at
        if before is not None and before.session_started_at == times.session_started_at:
            begun = before.step_finished_at
        passed += times.step_finished_at - begun
        seconds[batch.version + 1], before = passed, times
    return seconds


def resumptions(batches: Sequence[TrainedBatch]) -> list[int]:
    """Return the versions from which a later session trained on."""
    return [
        batch.version
        for before, batch in pairwise(batches)
        if before.times.session_started_at != batch.times.session_started_at
    ]
