"""What one engine did so far: counted from before its model is loaded until after it left.

An engine that was made again after it died has a tally for each life; `merge` adds them up.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from actors.rollout.occupancy import Occupancy


class ActorStatistics:
    """Counters of one actor.

    Args:
        engine_id: Holder of the leases.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.version: int | None = None
        """What the engine serves; None before the first weights."""
        self.tokens = 0
        """Sampled in rollouts that came to their end."""
        self.rollouts = 0
        self.groups: Counter[str] = Counter()
        """By what became of them."""
        self.occupancy = Occupancy()
        self.metrics: str | None = None
        """Where Prometheus finds the metrics of this life, as host:port."""

    def statistics(self) -> dict[str, Any]:
        """All of it, as JSON."""
        occupancy = self.occupancy
        occupancy.settle()
        return {
            "engine_id": self.engine_id,
            "pid": os.getpid(),
            "metrics": self.metrics,
            "version": self.version,
            "tokens_generated": self.tokens,
            "rollouts": self.rollouts,
            "groups": dict(self.groups),
            "running_rollouts": occupancy.running,
            "mean_running_rollouts": occupancy.mean_running,
            "serving_seconds": occupancy.serving_seconds,
            "idle_seconds": dict(occupancy.idle_seconds),
            "idle_fraction": occupancy.idle_fraction,
        }


def engine_id_of(index: int) -> str:
    """Holder of the leases of the actor with this number, from 0."""
    return f"engine-{index}"


def merge(lives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of one engine over its lives.

    Seconds that a later life waited for its first weights count as idle: the engine was missed.

    Args:
        lives: What `ActorStatistics.statistics` said of each, oldest first, at least one; what is
        true of a
            moment, such as the version, is the newest's.
    """
    newest, *earlier = reversed(lives)
    if not earlier:
        return dict(newest)
    serving = sum(life["serving_seconds"] for life in lives)
    running = sum(
        life["serving_seconds"] * (life["mean_running_rollouts"] or 0.0) for life in lives
    )
    groups: Counter[str] = Counter()
    idle: Counter[str] = Counter()
    for life in lives:
        groups.update(life["groups"])
        idle.update(life["idle_seconds"])
    missed = sum(life["idle_seconds"]["first_weights"] for life in lives[1:])
    return {
        **newest,
        "tokens_generated": sum(life["tokens_generated"] for life in lives),
        "rollouts": sum(life["rollouts"] for life in lives),
        "groups": dict(groups),
        "mean_running_rollouts": running / serving if serving else None,
        "serving_seconds": serving,
        "idle_seconds": dict(idle),
        "idle_fraction": (idle["leases"] + missed) / (serving + missed) if serving else None,
    }
