"""The window of staleness of a run in words: its moves, and the limit of throughput it ran into."""

from collections.abc import Sequence
from itertools import pairwise

from learner.diagnostics.batch_report import TrainedBatch
from queues.policy import auto_staleness, staleness_controller

BUSY = 0.05
"""A side that idles less than this share of the time limits the throughput."""
LIMITS = {
    "learner": "the learner, which is always busy: more ranks, or fewer actors",
    "actors": "the actors, which are always busy: more of them, or more rollouts at once",
    "window": "queues.window: free slots and the learner wait for long rollouts, and no more "
    "groups may be live meanwhile",
    "staleness": "queues.max_staleness: free slots and the learner wait for long rollouts, and no "
    "others may begin meanwhile",
    "ess": "queues.ess_target: a wider window would make tokens too stale",
}


def window_moves(batches: Sequence[TrainedBatch]) -> list[str]:
    """Say when and why the window moved, of batches in order."""
    texts = []
    for before, batch in pairwise(batches):
        old, new = (b.flow.get("staleness_window") for b in (before, batch))
        if None not in (old, new) and old != new:
            reason = _controller(batch).get("reason", "")
            texts.append(f"staleness window {old} → {new} at version {batch.version + 1}: {reason}")
    return texts


def limit_of(batches: Sequence[TrainedBatch]) -> str:
    """Return the key of LIMITS that a run with max_staleness = "auto" found; "" before it did."""
    return str(_controller(batches[-1]).get("limit", "")) if batches else ""


def advice(limit: str, actors_idle: float | None) -> str:
    """Say how to split devices otherwise; "" where neither side waits, or it is not known yet."""
    balanced = limit == "learner" and (actors_idle is None or actors_idle < BUSY)
    return f"throughput is limited by {LIMITS[limit]}" if limit in LIMITS and not balanced else ""


def _controller(batch: TrainedBatch) -> dict[str, object]:
    """Return the state of the controller after a batch; empty without one."""
    flow = batch.flow
    return flow.get(auto_staleness.STATE) or flow.get(staleness_controller.STATE) or {}
