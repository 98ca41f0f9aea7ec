"""What a running broker shows of itself, for `headway top` and for metrics."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from queues.records import BatchRecord, Purpose, PutStatus
from queues.state.broker_state import BrokerState
from queues.state.groups import State


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """One moment of a broker; made by `Broker.status`, for whoever watches the run."""

    version: int
    """Batches trained."""
    steps: int
    depth: Mapping[str, int]
    """Train groups by state."""
    oldest_ready_seconds: float
    """How long the oldest ready group has waited; 0 where none is ready."""
    oldest_queued_seconds: float
    """How long ago the oldest train group in line was issued; 0 where none is."""
    live: int
    """Train groups leased, ready or taken."""
    window: int
    """How many may be live."""
    staleness_window: int
    """New groups are due so many versions after their start: max_staleness, or less where the
    controller says so."""
    window_reason: str | None
    """Why the controller moved last; None without one."""
    overdue: int
    """Live groups whose deadline has passed."""
    engines: Mapping[str, int]
    """The version that each engine serves."""
    ended: Mapping[tuple[str, str], int]
    """Train groups that were dropped or failed, by state and reason."""
    given_back: Mapping[str, int]
    """Leases that ended without a result since the broker began, by reason."""
    refused: Mapping[str, int]
    """Results that were refused since then: of groups that have one (`duplicate`), or of lost
    leases (`fenced`)."""
    diverged: int
    """Batches since then that were trained again and gave other weights than before."""
    waits_for: Mapping[str, str | None]
    """Leased groups that are due, so that the learner waits for them, and who holds each."""
    evaluations: Sequence[str]
    """Names of the unfinished ones."""
    accepted: int
    """Results accepted in the whole run, evaluations included; with `version`, what shows that the
    run moves."""
    last_error: str | None
    """The latest failed attempt: which group and prompt, by whom, the reason and the text of the
    error. None where none has failed since the broker began."""
    paused: str | None
    """Why nothing is accepted or handed out for now: the disk is full. None while all is well."""
    batches: Sequence[BatchRecord]
    """The newest ones after the version asked for, oldest first."""


def status_of(book: BrokerState, after: int, *, paused: str | None) -> BrokerStatus:
    """This moment of a book, with the newest batches trained later than version `after`."""
    since, now = book.results.oldest_since(), time.monotonic()
    issued = book.prompts.oldest_since()
    return BrokerStatus(
        version=book.version,
        steps=book.bounds.steps,
        depth={str(state): book.groups.train(state) for state in State if state != State.SCORED},
        oldest_ready_seconds=0.0 if since is None else now - since,
        oldest_queued_seconds=0.0 if issued is None else now - issued,
        live=book.groups.live,
        window=book.bounds.within(book.staleness).window(book.version),
        staleness_window=book.staleness,
        window_reason=None if book.steering is None else book.steering.state.reason,
        overdue=book.groups.overdue,
        engines=dict(book.engines),
        ended={
            (str(state), reason): count
            for (purpose, state, reason), count in book.groups.counts.items()
            if purpose is Purpose.TRAIN and reason
        },
        given_back=dict(book.given_back),
        refused={
            str(reason): book.refused[reason] for reason in (PutStatus.DUPLICATE, PutStatus.FENCED)
        },
        diverged=book.diverged,
        waits_for={group.group_id: group.engine_id for group in book.waits_for()},
        evaluations=[run.name for run in book.evaluations.values() if not run.finished],
        accepted=book.accepted,
        last_error=book.last_error,
        paused=paused,
        batches=[batch for batch in book.batches if batch.version > after],
    )
