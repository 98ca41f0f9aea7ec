"""Calibration: the rates of a run's parts, estimated from its records.

Those of engines are fitted in `deploy.planner.engine_fit`. The learner's seconds of a step are
fitted over its tokens by least squares too. Seconds over fitted ones, by batch, are the paces: how
steady both sides are, and for how long they stay fast or slow.

The first batches are left out, and the last batches, which were trained when no group was leased
any more and engines ran empty; a simulation leaves them out too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from deploy.planner.engine_fit import Array, fit_engines, fit_pauses, least_squares
from deploy.planner.rates import LearnerRates, Rates
from deploy.report.report import read_batches
from deploy.report.summary import WARM_UP, sessions, successful_updates
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from learner.diagnostics.batch_report import BatchReport, TrainedBatch
from queues.errors import JournalError
from queues.readers.group_history import GroupTimes, last_lease, read_history
from weight_sync.announcements import WeightUpdateReport

LEAST_BATCHES = WARM_UP + 5
MOST_BATCHES = 100
"""The newest batches are measured, since a changed policy writes rollouts of other lengths."""
MOST_TIED = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rates of a run's parts, and figures of the run itself."""

    rates: Rates
    first: int
    """Version of the first batch in use, of the warm-up."""
    last: int
    explained: float
    """Share of the variance of rollout times that the engine's rates explain (R²)."""
    samples_per_second: float
    """Rollouts of these batches per second, those left out of their minibatches too."""
    learner_idle: float
    lag_mean: float

    @property
    def batches(self) -> int:
        """Number of batches in use, with those of the warm-up."""
        return self.last - self.first + 1


def leased_batches(directory: RunDirectory) -> tuple[list[TrainedBatch], list[TrainedBatch]]:
    """Return the batches of a run's last session, and those trained while groups were leased."""
    every = read_batches(directory)
    trained = sessions(every)[-1] if every else []
    leased = last_lease(directory.path) or 0.0
    return trained, [batch for batch in trained if batch.times.step_finished_at < leased]


def read_rates(directory: RunDirectory, *, first: int | None = None) -> Measured:
    """Estimate the rates of a run from its folder, whether it is going on or not.

    They are those of its last session: of its newest batches, or of so many `first` ones. Raises
    InputError if it has trained too few batches while groups were leased, or their rollouts are not
    there any more.
    """
    trained, leased = leased_batches(directory)
    batches = leased[-MOST_BATCHES:] if first is None else leased[:first]
    if len(batches) < LEAST_BATCHES:
        raise InputError(
            f"{directory.path} has trained {len(trained)} batches since it was last started, "
            f"{len(batches)} of them before its last group was leased; at least {LEAST_BATCHES} of "
            "these are needed to tell how fast its parts are"
        )
    first_version, last_version = batches[0].version, batches[-1].version
    oldest = max(batch.report.max_lag or 0 for batch in batches)
    try:
        history = read_history(directory.path, first_version, last_version + 1 + oldest)
    except JournalError as error:
        raise InputError(
            f"rates are measured of the rollouts of batches {first_version} to {last_version}, "
            f'which queues.keep_rollouts = "needed" removes in time: {error}'
        ) from None
    swaps = directory.rows("swaps.jsonl", lambda row: WeightUpdateReport(**row))
    return rates_of(batches, trained, swaps, history.groups)


def rates_of(
    batches: Sequence[TrainedBatch],
    session: Sequence[TrainedBatch],
    swaps: Sequence[WeightUpdateReport],
    groups: Sequence[GroupTimes],
) -> Measured:
    """Estimate rates from at least LEAST_BATCHES consecutive batches of a session, in order.

    The groups are in the order of acceptance. Of other batches of the session, groups count as load
    of an engine, and steps as seconds in which the learner computes.
    """
    measured = batches[WARM_UP:]
    reports = [batch.report for batch in measured]
    begin, end = batches[WARM_UP - 1].times.step_finished_at, batches[-1].times.step_finished_at
    seconds, updates = end - begin, successful_updates(swaps)
    trained = [group for group in groups if group.taken_at and begin < group.taken_at <= end]
    swapped = [update for update in updates if begin < update.published_at <= end]
    staging = [
        update.staged_at - update.published_at + update.prepare_seconds
        for update in swapped
        if update.staged_at is not None
    ]
    ends = [batch.times.step_finished_at for batch in batches[WARM_UP - 1 :]]
    steps = [(batch.times.wait_finished_at, batch.times.step_finished_at) for batch in session]
    engine, explained, engine_paces = fit_engines(groups, updates, np.array(steps), np.array(ends))
    learner, learner_paces = _learner(batches, trained)
    tokens = sum(report.tokens_trained for report in reports)
    return Measured(
        rates=Rates(
            engine=engine,
            learner=learner,
            update=replace(fit_pauses(groups, swapped), staging_seconds=_mean(staging)),
            lengths=tuple(tuple(max(1, tokens) for tokens in group.tokens) for group in trained),
            tied_share=_tied_share(reports, trained),
            ess_loss=_ess_loss(reports),
            paces=tuple(zip(learner_paces.tolist(), engine_paces.tolist(), strict=True)),
        ),
        first=batches[0].version,
        last=batches[-1].version,
        explained=explained,
        samples_per_second=sum(map(rollouts_of, reports)) / seconds,
        learner_idle=sum(batch.times.wait_seconds for batch in measured) / seconds,
        lag_mean=sum((r.lag_mean or 0.0) * r.tokens_trained for r in reports) / tokens,
    )


def rollouts_of(report: BatchReport) -> int:
    """Return the number of rollouts of a batch, trained or left out of its minibatches."""
    return report.rollouts_trained + (report.dropped_rollouts or 0)


def _learner(
    batches: Sequence[TrainedBatch], groups: Sequence[GroupTimes]
) -> tuple[LearnerRates, Array]:
    """Fit the rates of the learner, and its paces."""
    measured = batches[WARM_UP:]
    seconds = np.array([batch.times.step_seconds for batch in measured])
    tokens = np.array([_sampled_tokens(batch.report) for batch in measured])
    factors = np.stack([np.ones_like(tokens), tokens], axis=1)
    fitted = least_squares(factors, seconds)
    expected = factors @ fitted
    batch_seconds, token_seconds = fitted.tolist()
    taken = [g.taken_at for g in groups if g.taken_at and g.taken_at != g.accepted_at]
    fetches = [
        max(0.0, begun - min(taken, key=lambda time: abs(begun - time)))
        for begun in (batch.times.wait_finished_at for batch in measured if taken)
    ]  # of the nearest one, as clocks of two processes may differ
    pauses = [
        after.times.wait_started_at - batch.times.step_finished_at
        for batch, after in pairwise(batches[WARM_UP - 1 :])
    ]
    rates = LearnerRates(
        batch_seconds=batch_seconds,
        token_seconds=token_seconds,
        take_seconds=_mean(fetches),
        publish_seconds=_mean(pauses),
    )
    return rates, seconds / np.maximum(expected, 1e-9)


def _sampled_tokens(report: BatchReport) -> float:
    """Return the sampled tokens of a batch, trained or not, which a simulated step takes too."""
    mean = report.response_length_mean
    return float(report.tokens_trained) if mean is None else mean * rollouts_of(report)


def _tied_share(reports: Sequence[BatchReport], groups: Sequence[GroupTimes]) -> float:
    """Return the share of groups that were filtered (taken when accepted), or would have been."""
    filtered = sum(group.taken_at == group.accepted_at for group in groups)
    if filtered:
        return min(filtered / len(groups), MOST_TIED)
    counted = [report for report in reports if report.groups]
    tied, every = sum(r.tied_groups for r in counted), sum(r.groups for r in counted)
    return min(tied / every, MOST_TIED) if every else 0.0


def _ess_loss(reports: Sequence[BatchReport]) -> float | None:
    """Fit −ln ESS, about the variance of the log-ratios, by the mean square of the lag."""
    known = [(r.ess, r.lag_histogram) for r in reports if r.ess]
    squares = np.array(
        [
            sum(lag**2 * tokens for lag, tokens in lags.items()) / max(1, sum(lags.values()))
            for _, lags in known
        ]
    )
    if not np.any(squares):
        return None
    losses = -np.log([min(1.0, ess) for ess, _ in known])
    return float(squares @ losses / (squares @ squares))


def _mean(values: Sequence[float] | Array) -> float:
    return max(0.0, float(np.mean(values))) if len(values) else 0.0
