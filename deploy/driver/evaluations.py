"""Held-out evaluation through the prompt queue, as `deploy.config.evaluation_schedule` plans it.

All evaluations of a run are queued at its start; the broker leases each one as soon as an engine
serves its version. Evaluation does not stop training: an engine may take a newer version half-way,
so every score names the lowest and highest version that sampled it. At the first and the last
version nothing else is trained, and both are the same. With `heldout.pinned` they are the same
everywhere: one actor evaluates and does nothing else, and stays at a version until it is done;
training waits until it has the first version, and not for the score.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.config.evaluation_schedule import PlannedEvaluation, by_version
from deploy.driver.recorder import show_scores
from deploy.driver.run_context import RunContext
from deploy.observability.trackers import Trackers
from queues.protocols import PromptFeed
from queues.records import Evaluation, Prompt

if TYPE_CHECKING:
    from queues.ray_broker import BrokerClient

POLL_SECONDS = 0.2
"""Interval at which the broker is asked which engines serve a version."""
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
    broker: "BrokerClient",
    planned: Sequence[PlannedEvaluation],
    evaluator: str | None,
    *,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Wait until training may begin: the initial policy is scored, or its evaluator has it.

    The caller sets the deadline, and notices if the evaluator is lost.
    """
    first = [evaluation for evaluation in planned if evaluation.version == 0]
    if evaluator is None:
        for evaluation in first:
            await outcome(broker, evaluation)
        return
    while True:
        status = await broker.status()
        unfinished = any(evaluation.name in status.evaluations for evaluation in first)
        if not unfinished or evaluator in status.engines:
            return
        await asyncio.sleep(poll_seconds)


async def outcome(feed: PromptFeed, planned: PlannedEvaluation) -> Evaluation:
    """Wait for one evaluation and return it; the caller sets the deadline."""
    while True:
        evaluation = await feed.evaluation(planned.name, timeout=OUTCOME_SECONDS)
        if evaluation is not None:
            return evaluation


async def collect(context: RunContext, feed: PromptFeed, trackers: Trackers) -> None:
    """Record and show the scores of each version that is not scored yet, when they are complete."""
    record = context.record
    for version, planned in by_version(context.inputs.evaluations):
        if version in record.scored:
            continue
        scores = {p.kind: await outcome(feed, p) for p in planned}
        samples = {p.kind: p.samples for p in planned}
        record.add_scores(version, scores, now=time.time(), samples=samples)
        trackers.scores(version, record.newest_scores())
        text = show_scores(record.newest_scores()) or "every rollout failed"
        context.console.say(f"held-out at version {version}: {text}")
