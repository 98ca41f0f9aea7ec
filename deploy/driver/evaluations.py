"""Held-out evaluation through the prompt queue, as `deploy.config.evaluation_schedule` plans it.

All evaluations of a run are queued at its start; the broker leases each one as soon as an engine
serves its version. Evaluation does not stop training: an engine may take a newer version half-way,
so every score names the lowest and highest version that sampled it. With `heldout.pinned` they are
the same: one actor only evaluates, and stays at a version until it is done; training waits until
it has the first version, and not for the score. Another process that takes its place has the newest
weights, and finishes what the one before had begun; that is said.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from deploy.config.evaluation_schedule import PlannedEvaluation
from deploy.driver.recorder import show_scores
from deploy.driver.run_context import RunContext
from deploy.observability.trackers import Trackers
from headway import clock
from headway.roles import ProcessName
from queues.protocols import PromptFeed
from queues.ray_broker import BrokerClient
from queues.records import Prompt

OUTCOME_SECONDS = 10.0
"""Timeout of one long poll of the broker for the end of an evaluation."""


async def queue_all(
    feed: PromptFeed, planned: Sequence[PlannedEvaluation], prompts: Sequence[Prompt]
) -> None:
    """Queue every evaluation on its first held-out prompts, each as often as it is sampled."""
    for evaluation in planned:
        await feed.evaluate(
            evaluation.name,
            [*prompts[: evaluation.size]] * evaluation.samples,
            temperature=evaluation.temperature,
            min_version=evaluation.version,
        )


async def initial(
    broker: BrokerClient,
    planned: Sequence[PlannedEvaluation],
    evaluator: ProcessName | None,
    *,
    poll_seconds: float = 0.2,
) -> None:
    """Wait until training may begin: the initial policy is scored, or its evaluator has it.

    Has no deadline of its own: the watchdog ends a run in which nothing moves.
    """
    first = {evaluation.name for evaluation in planned if evaluation.version == 0}
    while True:
        status = await broker.status()
        scored = first.isdisjoint(status.evaluations)
        if scored or (evaluator is not None and evaluator.engine_id in status.engines):
            return
        await asyncio.sleep(poll_seconds)


async def collect(context: RunContext, broker: BrokerClient, trackers: Trackers) -> None:
    """Record and show the scores of each version that is not scored yet, when they are complete."""
    record = context.record
    scored = {row["version"] for row in record.heldout}
    for version, evaluations in groupby(context.inputs.prompts.evaluations, attrgetter("version")):
        if version in scored:
            continue
        results = []
        for planned in evaluations:  # without a deadline: the watchdog ends a run that stalls
            while not (result := await broker.evaluation(planned.name, timeout=OUTCOME_SECONDS)):
                pass
            results.append((planned, result))
        for planned, result in results:
            record.add_score(planned, result, now=clock.now())
        scores = record.newest_scores()
        figures = {kind: score.value for kind, score in scores.items()}
        failed = {f"{kind}/failed": float(score.failed) for kind, score in scores.items()}
        trackers.scores(version, figures | failed)
        context.console.say(f"held-out at version {version}: {show_scores(scores)}")
        ends = [v for _, result in results for v in (result.lowest_version, result.highest_version)]
        versions, heldout = {v for v in ends if v is not None}, context.config.heldout
        if heldout is not None and heldout.pinned and len(versions) > 1:
            context.console.say(
                f"it is sampled by versions {min(versions)} to {max(versions)} though "
                "heldout.pinned = true: its actor died, or took longer than heldout.pinned_seconds"
            )
        if any(result.failed for _, result in results):
            latest = (await broker.status(after=record.version)).last_error
            context.console.say(f"the latest failed attempt: {latest}")
