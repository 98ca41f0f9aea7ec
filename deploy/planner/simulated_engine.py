"""An engine in simulated time."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from deploy.planner.rates import EngineRates
from queues.records import Lease

FOREVER = float("inf")


@dataclass(slots=True)
class SimulatedEngine:
    """Rollouts that share an engine's speed, and the version that samples each of their tokens."""

    name: str
    rates: EngineRates
    free_slots: int
    version: int = 0
    now: float = 0.0
    token: float = 0.0
    """Tokens that a rollout which always ran would have by now."""
    stalled: float = 0.0
    """Seconds of other work before the next token."""
    running: list[tuple[float, int, float, Lease]] = field(default_factory=list)
    """Heap of rollouts: the token at which one ends, a serial number, the token at which it began,
    its lease."""
    swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """Versions with the token from which each of them samples."""
    updating: bool = False
    valid_event: int = 0
    """Number of the planned end that is still valid; earlier ones are ignored."""
    idle_seconds: float = 0.0
    rollout_seconds: float = 0.0

    def advance(self, now: float) -> None:
        """Let time pass with the rollouts that are running."""
        passed, self.now = now - self.now, now
        self.rollout_seconds += passed * len(self.running)
        if not self.running:
            self.idle_seconds += passed
        waited = min(passed, self.stalled)
        self.stalled -= waited
        if self.running:
            self.token += (passed - waited) / self.rates.token_seconds(len(self.running))

    def next_end(self) -> float:
        """Return the time at which the next rollout ends if nothing else happens."""
        if not self.running:
            return FOREVER
        left = max(0.0, self.running[0][0] - self.token)
        return self.now + self.stalled + left * self.rates.token_seconds(len(self.running))

    def sampled(self, began: float, length: int) -> Counter[int]:
        """Count the tokens of a rollout by the version that sampled them."""
        tokens: Counter[int] = Counter()
        index = bisect_right(self.swaps, began, key=lambda swap: swap[0]) - 1
        done = 0
        while done < length:
            version = self.swaps[index][1]
            index += 1
            until = self.swaps[index][0] - began if index < len(self.swaps) else FOREVER
            upto = length if until >= length else max(done, round(until))
            tokens[version] += upto - done
            done = upto
        return +tokens
