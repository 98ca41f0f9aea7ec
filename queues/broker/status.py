"""The status of a running broker, for `headway top`, the driver and the broker's metrics."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from queues.records import BatchRecord, Purpose, PutStatus
from queues.state.broker_state import BrokerState
from queues.state.groups import State


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """A broker at one moment; fields that `BrokerState` has too are described there."""

    version: int
    """Batches trained."""
    learner: tuple[int, int] = (0, -1)
    steps: int
    depth: Mapping[str, int]
    """Train groups by state."""
    oldest_ready_seconds: float
    """Longest time that a ready group has waited; 0 if none is ready."""
    oldest_queued_seconds: float
    """Age of the oldest train group in the prompt queue; 0 if it is empty."""
    live: int
    """Train groups leased, ready or taken."""
    window: int
    """Largest number of groups that may be live."""
    staleness_window: int
    """New groups are due so many versions after their start."""
    window_moves: Mapping[str, int]
    overdue: int
    """Live groups whose deadline has passed."""
    engines: Mapping[str, int]
    ended: Mapping[tuple[str, str], int]
    """Train groups that were dropped or failed, by state and reason."""
    given_back: Mapping[str, int]
    refused: Mapping[str, int]
    """Results that were refused since the broker began, by `PutStatus`."""
    diverged: int
    waits_for: Mapping[str, str | None]
    """Engine of each leased group that the learner waits for."""
    evaluations: Sequence[str]
    """Names of the unfinished evaluations."""
    accepted: int
    last_error: str | None
    """The latest failed attempt since the broker began: group, prompt, engine, reason and error."""
    paused: str | None
    """Reason why nothing is accepted or handed out now: the disk is full."""
    batches: Sequence[BatchRecord]
    """The newest batches after the requested version, oldest first."""


def status_of(state: BrokerState, after: int, *, paused: str | None) -> BrokerStatus:
    """Return the status of a broker, with the newest batches trained later than version `after`."""
    now = time.monotonic()
    return BrokerStatus(
        version=state.version,
        learner=state.learner,
        steps=state.bounds.steps,
        depth={str(x): state.groups.train(x) for x in State if x != State.SCORED},
        oldest_ready_seconds=max((now - group.ready_at for group in state.results), default=0.0),
        oldest_queued_seconds=state.prompts.oldest_seconds(now),
        live=state.groups.live,
        window=state.lease_bounds.window(state.version),
        staleness_window=state.staleness,
        window_moves=dict(state.window_moves),
        overdue=state.groups.overdue,
        engines=dict(state.engines),
        ended={
            (str(group_state), reason): count
            for (purpose, group_state, reason), count in state.groups.counts.items()
            if purpose is Purpose.TRAIN and reason
        },
        given_back=dict(state.given_back),
        refused={str(x): state.answers[x] for x in (PutStatus.DUPLICATE, PutStatus.FENCED)},
        diverged=state.diverged,
        waits_for={group.group_id: group.engine_id for group in state.waits_for()},
        evaluations=[run.name for run in state.evaluations.values() if not run.finished],
        accepted=state.accepted,
        last_error=state.last_error,
        paused=paused,
        batches=[batch for batch in state.batches if batch.version > after],
    )
