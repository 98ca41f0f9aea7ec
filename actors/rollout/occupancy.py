"""Occupancy of an engine: mean number of concurrent rollouts, and idle seconds by reason."""

import time
from collections.abc import Callable


class Occupancy:
    """Integrates the number of running rollouts over time; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._serving = False
        self._frozen = False
        self.running = 0
        """Rollouts running now."""
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
