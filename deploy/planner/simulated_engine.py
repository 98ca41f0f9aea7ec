"""An engine in simulated time: its rollouts share its speed, and every token knows its version."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from deploy.planner.rates import EngineRates
from queues.records import Lease

FOREVER = float("inf")


@dataclass(slots=True)
class SimulatedEngine:
    """Rollouts that share an engine's speed. A token is one more for each that is running."""

    name: str
    rates: EngineRates
    room: int
    version: int = 0
    now: float = 0.0
    token: float = 0.0
    """Tokens that a rollout which always ran would have by now."""
    stalled: float = 0.0
    """Seconds of other work before the next token."""
    running: list[tuple[float, int, float, Lease]] = field(default_factory=list)
    """A heap: the token at which it ends, a number, that at which it began, its lease."""
    swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """From which token on which version samples."""
    updating: bool = False
    plan: int = 0
    """Which of its planned events is the valid one."""
    idle_seconds: float = 0.0
    rollout_seconds: float = 0.0

    def advance(self, now: float) -> None:
        """Lets time pass, with the rollouts that there are."""
        passed, self.now = now - self.now, now
        self.rollout_seconds += passed * len(self.running)
        if not self.running:
            self.idle_seconds += passed
        waited = min(passed, self.stalled)
        self.stalled -= waited
        if self.running:
            self.token += (passed - waited) / self.rates.token_seconds(len(self.running))

    def next_end(self) -> float:
        """When its next rollout ends if nothing else happens."""
        if not self.running:
            return FOREVER
        left = max(0.0, self.running[0][0] - self.token)
        return self.now + self.stalled + left * self.rates.token_seconds(len(self.running))

    def sampled(self, began: float, length: int) -> Counter[int]:
        """Tokens of a rollout by the version that sampled them."""
        tokens: Counter[int] = Counter()
        place = bisect_right(self.swaps, began, key=lambda swap: swap[0]) - 1
        done = 0
        while done < length:
            version = self.swaps[place][1]
            place += 1
            until = self.swaps[place][0] - began if place < len(self.swaps) else FOREVER
            upto = length if until >= length else max(done, round(until))
            tokens[version] += upto - done
            done = upto
        return +tokens
