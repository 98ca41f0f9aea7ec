"""Counters of one actor, which are 0 again after a restart; `merge` adds up its lives."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.outages import Outages
from actors.rollout.agent_statistics import AgentStatistics, merge_agents


class Occupancy:
    """Integrates the number of running rollouts over time; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._serving = False
        self._frozen = False
        self.running = 0
        self.idle_seconds = {"first_weights": 0.0, "leases": 0.0}
        """Seconds without any running rollout, by the reason of the wait."""
        self.serving_seconds = 0.0
        """Seconds since the first weights."""
        self._rollout_seconds = 0.0

    def serve(self) -> None:
        """Count the engine as serving from now on."""
        self.settle()
        self._serving = True

    def change(self, rollouts: int) -> None:
        """Count rollouts that begin (above 0) or end (below 0)."""
        self.settle()
        self.running += rollouts

    def freeze(self) -> None:
        """Stop counting: the work is over."""
        self.settle()
        self._frozen = True

    def settle(self) -> None:
        """Count the time since the last call."""
        if self._frozen:
            return
        now = self._clock()
        passed, self._since = now - self._since, now
        self._rollout_seconds += passed * self.running
        if self._serving:
            self.serving_seconds += passed
        if not self.running:
            self.idle_seconds["leases" if self._serving else "first_weights"] += passed

    @property
    def idle_fraction(self) -> float | None:
        """Share of the time since the first weights without any running rollout."""
        return self.idle_seconds["leases"] / self.serving_seconds if self.serving_seconds else None

    @property
    def mean_running(self) -> float | None:
        """Mean number of concurrent rollouts since the first weights."""
        return self._rollout_seconds / self.serving_seconds if self.serving_seconds else None


class ActorStatistics:
    """Counters of one actor, whose leases are held under `engine_id`."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.version: int | None = None
        """Version that the engine serves; None before the first weights."""
        self.tokens = 0
        """Tokens sampled, evaluations included; none of rollouts that failed."""
        self.rollouts = 0
        self.groups: Counter[str] = Counter()
        """Groups by their result."""
        self.occupancy = Occupancy()
        self.agents = AgentStatistics()
        self.outages: Outages | None = None
        """Services that its rollouts wait for; None while it loads."""
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
            "agents": self.agents.statistics(),
            "outages": self.outages.reports() if self.outages else [],
            "running_rollouts": occupancy.running,
            "mean_running_rollouts": occupancy.mean_running,
            "serving_seconds": occupancy.serving_seconds,
            "idle_seconds": dict(occupancy.idle_seconds),
            "idle_fraction": occupancy.idle_fraction,
        }


def merge(lives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of one actor over its lives, oldest first, at least one.

    Momentary values, such as the version, are the newest. Seconds that a restarted actor waited for
    its first weights count as idle.
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
        "agents": merge_agents([life["agents"] for life in lives]),
        "mean_running_rollouts": running / serving if serving else None,
        "serving_seconds": serving,
        "idle_seconds": dict(idle),
        "idle_fraction": (idle["leases"] + missed) / (serving + missed) if serving else None,
    }
