"""Control of the staleness of new groups where `queues.max_staleness = "auto"`.

    ack(v) ─ESS, waits, use of the deadlines─▶ controller ─w─▶ leases: deadline s + w

A wider window of staleness w lets engines run ahead of the learner and long rollouts take their
time; it costs lag. The run begins with START and looks for the smallest window up to η that costs
no throughput. A decision is taken over the means of max(`batches`, w + 1) batches, of 2 · `batches`
once w was narrowed, and after a move of w those that were leased before it are left out. It asks
for the first of these that holds:

    narrow  ESS is below its floor: to the w at which it would be there. Of log-normal ratios,
            −log ESS is the variance of their logarithms, which grows as w² for a policy that moves
            on in one direction. Where it is below floor², `batches` batches are always enough.
    narrow  There is room: every group was ready k versions before its deadline, and trained so long
            before it, or there were k batches of ready groups behind it. With deadlines k earlier
            the learner would have trained as many batches in the same time.
    keep    The learner idles for less than BUSY of its time. It limits the throughput.
    widen   The learner waits for groups that are due, while a batch is ready, or engines with free
            slots for the window: 2w until w was narrowed once, then w + 1.
    keep    Engines are full, or `queues.window` is. A wider window would change nothing.

w is narrowed by half of the room, rounded up, as few batches do not show the longest rollout, and
once room was found `patience` times in a row. Every turn of direction doubles patience, up to
MOST_PATIENCE, and every move on in the same direction halves it. It is widened at once, as
throughput is lost; but a w at which ESS was below its floor is tried again only when `retries`
decisions in a row ask for it, and these double each time. So noise moves w ever more rarely,
while rates that change are followed. `queues.policy.admission` has the effect of a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, log, sqrt
from typing import Any

from queues.policy.staleness_controller import MOST_PATIENCE

STATE = "auto_staleness"
"""Key in the statistics of a batch: state of the controller after it."""
TINY = 1e-6
"""Least ESS of which a logarithm is taken."""
START = 2
"""w of the first batches, where η is no less."""
BUSY = 0.03
"""A learner that idles less than this share of its time limits the throughput."""
DUE = 0.02
"""Share of the learner's time in waits for groups that are due from which a wider window is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One batch's figures, or the means of several; room is the least."""

    ess: float
    idle: float
    """Share of the learner's time in which it waited for the batch."""
    due: float
    """Share in which it waited for groups that were due, while a batch was ready."""
    held: float
    """1 if the window refused a lease that `queues.window` allowed, else 0."""
    full: float
    """1 if `queues.window`, smaller than the widest window, refused one, else 0."""
    room: float
    """Versions by which all deadlines could have been earlier, for the same batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoState:
    """The controller's memory; kept with the statistics of every batch."""

    window: int
    """w: new groups are due so many versions after their start."""
    settling: int = 0
    """Batches that still decide nothing."""
    batches: int = 0
    """Batches that count for the next decision so far."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means of their `Figures`."""
    asked: int = 0
    """Direction that the last decisions asked for."""
    times: int = 0
    """How often in a row."""
    patience: int = 1
    stale: int | None = None
    """The w at which ESS was last below its floor; None once it was not."""
    retries: int = 1
    """Decisions in a row that have to ask for it until it is tried again."""
    was_narrowed: bool = False
    """True from the first narrowing on: the window no longer grows twofold."""
    moved: int = 0
    """The last step of w; 0 before the first."""
    limit: str = ""
    """Limit as of the last decision: learner, actors, window, staleness or ess; "" before it."""
    reason: str = "start"
    """Reason of the last move."""


@dataclass(slots=True, kw_only=True)
class AutoStaleness:
    """The controller of one run, which is restored from the statistics of the newest batch."""

    floor: float
    """Least ESS, as a fraction."""
    most: int
    """η, the widest window."""
    batches: int
    """Fewest batches for a decision, until w was narrowed."""
    state: AutoState = field(init=False)
    """The state after the newest batch."""

    def __post_init__(self) -> None:
        self.restore({})

    def after(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state after a batch with these statistics, to be kept with them."""
        state = self.next_state(self.state, figures_of(statistics))
        return {"staleness_window": state.window, STATE: asdict(state)}

    def restore(self, statistics: Mapping[str, Any]) -> None:
        """Continue from the statistics of the newest batch; without a state, from the start."""
        start = {"window": START, "settling": START + 1}
        state = AutoState(**statistics.get(STATE, start))
        self.state = replace(state, window=min(state.window, self.most))

    def next_state(self, state: AutoState, figures: Figures | None) -> AutoState:
        """Return the state after one more batch; one without figures changes nothing."""
        if figures is None:
            return state
        if state.settling:
            return replace(state, settling=state.settling - 1)
        count = state.batches + 1
        sums = state.figures or dict.fromkeys(asdict(figures), 0.0)
        means = {name: sums[name] + (x - sums[name]) / count for name, x in asdict(figures).items()}
        means["room"] = min(figures.room, state.figures.get("room", figures.room))
        is_clear = means["ess"] < self.floor**2 or not state.was_narrowed
        enough = self.batches if is_clear else 2 * self.batches
        if count >= enough and (means["ess"] < self.floor or count > state.window):
            return self._decide(replace(state, batches=0, figures={}), Figures(**means))
        return replace(state, batches=count, figures=means)

    def _decide(self, state: AutoState, seen: Figures) -> AutoState:
        """Return the state after a decision."""
        step, limit, reason = self._asked(state, seen)
        sign = (step > 0) - (step < 0)
        times = state.times + 1 if sign and sign == state.asked else 1
        if state.stale is not None and state.window >= state.stale and limit != "ess":
            state = replace(state, stale=None)
        state = replace(state, asked=sign, times=times, limit=limit)
        needed = 1
        if step < 0 and limit != "ess":
            needed = state.patience
        elif state.stale is not None and state.window + step >= state.stale:
            needed = state.retries
        return self._moved(state, step, reason) if sign and times >= needed else state

    def _asked(self, state: AutoState, seen: Figures) -> tuple[int, str, str]:
        """Return the step of w that figures ask for, the limit of throughput, and the reason."""
        window, idle = state.window, f"learner idle {seen.idle:.0%}"
        if seen.ess < self.floor:
            reason = f"ess {seen.ess:.3f} < {self.floor:g}"
            fitting = round(window * sqrt(log(self.floor) / log(max(seen.ess, TINY))))
            return min(fitting, window - 1) - window if window else 0, "ess", reason
        limit = "learner" if seen.idle < BUSY else "window" if seen.full > 0.5 else "actors"
        if room := min(window, int(seen.room)):
            reason = f"room: every group was ready {room} versions before it was due"
            return -((room + 1) // 2), limit, reason
        if limit == "learner":
            return 0, limit, ""
        wider = min(1 if state.was_narrowed else max(1, window), self.most - window)
        if seen.due > DUE:
            return wider, "staleness", f"due: {idle}, {seen.due:.0%} for groups that were due"
        if seen.held > 0.5:
            return wider, "staleness", f"full: {idle}, and the window, not the engines, is full"
        return 0, limit, ""

    def _moved(self, state: AutoState, step: int, reason: str) -> AutoState:
        """Return the state with another window."""
        patience = 2 * state.patience if step * state.moved < 0 else state.patience // 2
        window, is_stale = state.window + step, state.limit == "ess"
        return replace(
            state, window=window, moved=step, reason=reason, asked=0, times=0,
            settling=max(state.window, window) + 1, patience=max(1, min(patience, MOST_PATIENCE)),
            was_narrowed=state.was_narrowed or step < 0,
            stale=state.window if is_stale else state.stale,
            retries=min(2 * state.retries, MOST_PATIENCE) if is_stale else state.retries,
        )  # fmt: skip


def figures_of(statistics: Mapping[str, Any]) -> Figures | None:
    """Return the figures of a batch's statistics; None if its times are unknown."""
    ess, began = statistics.get("ess"), statistics.get("wait_started_at")
    if began is None or (seconds := statistics["step_finished_at"] - began) <= 0:
        return None
    waited = statistics["wait_finished_at"] - began
    return Figures(
        ess=ess if ess is not None and isfinite(ess) else 1.0,
        idle=waited / seconds,
        due=min(waited, statistics.get("due_seconds", 0.0)) / seconds,
        held=statistics.get("leases_held", 0.0),
        full=statistics.get("window_full", 0.0),
        room=statistics.get("deadline_room", 0.0),
    )


def use_of_deadlines(
    ready: Sequence[tuple[int, int, float]],
    count: int,
    *,
    version: int,
    groups_per_batch: int,
    has_waited: bool,
) -> dict[str, float]:
    """Return what the batch of `version` shows of the window.

    `deadline_room` is in versions; `due_seconds` are those from the moment at which enough groups
    for a batch were ready to that at which the last one was, if the learner waited for a due one.

    Args:
        ready: Deadline, version and time at which it was ready, of every ready group; the first
            `count` are taken.
        count: Number of groups of the batch.
        version: v.
        groups_per_batch: B.
        has_waited: A batch was ready, and a group that was due was not.
    """
    taken, times = ready[:count], sorted(at for _, _, at in ready)
    waiting = min(due for due, _, _ in taken) - version + (len(ready) - count) / groups_per_batch
    early = min(due - arrived for due, arrived, _ in taken)
    return {
        "deadline_room": max(0.0, min(early, waiting)),
        "due_seconds": times[-1] - times[count - 1] if has_waited else 0.0,
    }
