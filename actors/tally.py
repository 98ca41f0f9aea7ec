"""What one engine did so far: counted from before its model is loaded until after it left."""

from collections import Counter
from typing import Any

from actors.occupancy import Occupancy


class Tally:
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

    def statistics(self) -> dict[str, Any]:
        """All of it, as JSON."""
        occupancy = self.occupancy
        occupancy.settle()
        return {
            "engine_id": self.engine_id,
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
