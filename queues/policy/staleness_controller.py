"""How stale new groups may be, so that the effective sample size stays above a set point. Pure.

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

So the widest window that holds the target is found and kept: the one above it is tried ever more
rarely, but never given up, since ESS changes as the policy settles. There is no step that could
carry w from one end to the other, and at the ends it stays. Leaves out what ESS is
(`learner.diagnostics.off_policy`) and what a window admits (`queues.policy.admission`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

STATE = "window_controller"
"""Key in the statistics of a batch: the state of the controller after it."""
MOST_PATIENCE = 32
"""Decisions between two tries of a window that was too wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """What the controller knows; kept with the statistics of every batch."""

    window: int
    """w: new groups are due so many versions after their start."""
    settling: int = 0
    """Batches that still decide nothing."""
    batches: int = 0
    """That the next decision has so far."""
    ess: float = 0.0
    """Their mean."""
    good: int = 0
    """Decisions in a row at the target or above."""
    patience: int = 1
    tries: bool = False
    """The window was widened, and nothing is decided there yet."""
    reason: str = "start"
    """Of the last move."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowController:
    """The rule; its state is apart, so that it can be kept and gone on from.

    Example:
        >>> controller = WindowController(target=0.8, most=4, batches=1)
        >>> state = controller.after(controller.start(), 0.6)
        >>> state.window, state.settling, state.reason
        (3, 5, 'ess 0.600 < 0.8')
    """

    target: float
    """Set point of ESS, as a fraction."""
    most: int
    """η."""
    batches: int
    """That one decision is made of."""

    def start(self) -> WindowState:
        """The widest window."""
        return WindowState(window=self.most)

    def within_bounds(self, state: WindowState) -> WindowState:
        """The state that a run goes on with whose η may be smaller than before."""
        return replace(state, window=min(state.window, self.most))

    def after(self, state: WindowState, ess: float | None) -> WindowState:
        """The state after one more batch; None, or not a number, where nothing was measured."""
        if ess is None or not math.isfinite(ess):
            return state
        if state.settling:
            return replace(state, settling=state.settling - 1)
        count = state.batches + 1
        mean = state.ess + (ess - state.ess) / count
        if count < self.batches:
            return replace(state, batches=count, ess=mean)
        if mean < self.target:
            return self._narrow(state, mean)
        return self._widen(state, mean)

    def _narrow(self, state: WindowState, mean: float) -> WindowState:
        patience = min(2 * state.patience, MOST_PATIENCE) if state.tries else state.patience
        kept = replace(state, batches=0, ess=0.0, good=0, patience=patience, tries=False)
        if state.window == 0:
            return kept
        return _moved(kept, state.window - 1, f"ess {mean:.3f} < {self.target:g}")

    def _widen(self, state: WindowState, mean: float) -> WindowState:
        patience, good = (1 if state.tries else state.patience), state.good + 1
        kept = replace(state, batches=0, ess=0.0, good=good, patience=patience, tries=False)
        if state.window == self.most or good < patience:
            return kept
        widened = _moved(kept, state.window + 1, f"ess {mean:.3f} >= {self.target:g}")
        return replace(widened, good=0, tries=True)


def _moved(state: WindowState, window: int, reason: str) -> WindowState:
    return replace(state, window=window, settling=max(state.window, window) + 1, reason=reason)


class StalenessController:
    """The controller of one run: its state goes with the statistics of every batch, and from there.

    Args:
        controller: Decides.
    """

    def __init__(self, controller: WindowController) -> None:
        self._controller = controller
        self.state = controller.start()

    def after(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """What a batch with these statistics of the learner's decides, to be kept with them."""
        state = self._controller.after(self.state, statistics.get("ess"))
        return {"staleness_window": state.window, STATE: state.to_dict()}

    def go_on(self, statistics: Mapping[str, Any]) -> None:
        """Go on from what was kept with the newest batch; without any, from the start."""
        said = statistics.get(STATE)
        state = self._controller.start() if said is None else WindowState.from_dict(said)
        self.state = self._controller.within_bounds(state)
