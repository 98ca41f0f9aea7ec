"""Control of the staleness of new groups, which keeps the effective sample size at a set point.

    ack(v) ─ESS of the batch─▶ controller ─w─▶ leases: deadline s + w, at most (w + 1)·B live
                  ▲                                      │
                  └────── batches of that lag ◀──────────┘ w + 1 batches later

ESS is a fraction of the tokens of a batch: 1 on-policy, less the older its tokens are, and noisy.
The window of staleness w moves by one, within [0, η]; deadlines already given stay, so what a move
does shows only once the groups that were leased before it are trained.

    settle   After a move the next max(old, new) + 1 batches decide nothing.
    decide   Then every `batches` batches by their mean ESS.
    narrow   Below the target: w − 1.
    widen    At the target or above, `patience` times in a row: w + 1. If the first decision there
             is to narrow again, patience doubles (at most MOST_PATIENCE); if not, it is 1 again.

So the widest window that holds the target is found and kept; the next wider one is tried ever more
rarely, but never given up, since ESS changes as the policy settles. ESS is defined in
`learner.diagnostics.off_policy`, the effect of a window in `queues.policy.admission`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

STATE = "window_controller"
"""Key in the statistics of a batch: state of the controller after it."""
MOST_PATIENCE = 32
"""Decisions between two tries of a window that was too wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """The controller's memory; kept with the statistics of every batch."""

    window: int
    """w: new groups are due so many versions after their start."""
    settling: int = 0
    """Batches that still decide nothing."""
    batches: int = 0
    """Batches that count for the next decision so far."""
    ess: float = 0.0
    """Mean ESS of these batches."""
    good: int = 0
    """Decisions in a row at the target or above."""
    patience: int = 1
    tries: bool = False
    """True from a widening until the first decision after it."""
    reason: str = "start"
    """Reason of the last move."""


@dataclass(slots=True, kw_only=True)
class StalenessController:
    """The controller of one run, which is restored from the statistics of the newest batch.

    Example:
        >>> controller = StalenessController(target=0.8, most=4, batches=1)
        >>> state = controller.next_state(controller.state, 0.6)
        >>> state.window, state.settling, state.reason
        (3, 5, 'ess 0.600 < 0.8')
    """

    target: float
    """Set point of ESS, as a fraction."""
    most: int
    """η, the widest window."""
    batches: int
    """Batches for each decision."""
    state: WindowState = field(init=False)
    """The state after the newest batch; the widest window before the first."""

    def __post_init__(self) -> None:
        self.restore({})

    def after(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state after a batch with these statistics, to be kept with them."""
        state = self.next_state(self.state, statistics.get("ess"))
        return {"staleness_window": state.window, STATE: asdict(state)}

    def restore(self, statistics: Mapping[str, Any]) -> None:
        """Continue from the statistics of the newest batch; without a state, from the start."""
        state = WindowState(**statistics.get(STATE, {"window": self.most}))
        # η may be smaller now than in the session before.
        self.state = replace(state, window=min(state.window, self.most))

    def next_state(self, state: WindowState, ess: float | None) -> WindowState:
        """Return the state after one more batch; an ESS of None or NaN changes nothing."""
        if ess is None or not math.isfinite(ess):
            return state
        if state.settling:
            return replace(state, settling=state.settling - 1)
        count = state.batches + 1
        mean = state.ess + (ess - state.ess) / count
        if count < self.batches:
            return replace(state, batches=count, ess=mean)
        return self._decide(state, mean)

    def _decide(self, state: WindowState, mean: float) -> WindowState:
        """Return the state after a decision by the mean ESS of its batches."""
        holds, patience = mean >= self.target, state.patience
        if state.tries:
            patience = 1 if holds else min(2 * patience, MOST_PATIENCE)
        good = state.good + 1 if holds else 0
        kept = replace(state, batches=0, ess=0.0, good=good, patience=patience, tries=False)
        window = state.window + (good >= patience) if holds else state.window - 1
        if window == state.window or not 0 <= window <= self.most:
            return kept
        settling = max(state.window, window) + 1
        reason = f"ess {mean:.3f} {'>=' if holds else '<'} {self.target:g}"
        moved = replace(kept, window=window, settling=settling, reason=reason)
        return replace(moved, good=0, tries=holds)
