"""Counters of one actor, from before its model is loaded until after it has left.

An actor that is restarted counts from 0; `merge` adds up the statistics of its lives.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from actors.rollout.occupancy import Occupancy


class ActorStatistics:
    """Counters of one actor, whose leases are held under `engine_id`."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.version: int | None = None
        """Version that the engine serves; None before the first weights."""
        self.tokens = 0
        """Tokens sampled in rollouts that ended."""
        self.rollouts = 0
        self.groups: Counter[str] = Counter()
        """Groups by their result."""
        self.occupancy = Occupancy()
        self.metrics: str | None = None
        """Address of the metrics of this process, as host:port."""

    def statistics(self) -> dict[str, Any]:
        """Return all counters, as JSON."""
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
    """Return the id under which actor `index`, from 0, holds leases."""
    return f"engine-{index}"


def merge(lives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of one actor over its lives.

    Seconds that a restarted actor waited for its first weights count as idle.

    `lives` holds the result of `ActorStatistics.statistics` of each life, oldest first, at least
    one. Momentary values, such as the version, are taken from the newest.
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
