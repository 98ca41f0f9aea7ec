"""Held-out evaluation through the prompt queue: which versions, which problems, and the scores.

All evaluations of a run are queued at its start; the broker leases each one as soon as an engine
serves its version. Evaluation does not stop training: an engine may take a newer version half-way,
so every score names the lowest and highest version that sampled it. At the first and the last
version nothing else is trained, and both are the same. With `heldout.pinned` they are the same
everywhere: one actor evaluates and does nothing else, and stays at a version until it is done;
training waits until it has the first version, and not for the score.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.config.evaluation_schedule import Planned
from queues.protocols import PromptFeed
from queues.records import Evaluation, Prompt

if TYPE_CHECKING:
    from queues.ray_broker import BrokerClient

POLL_SECONDS = 0.2
"""Between looks at which engines serve a policy."""


async def queue_all(
    feed: PromptFeed, planned: Sequence[Planned], prompts: Sequence[Prompt]
) -> None:
    """Queues every evaluation on its first held-out prompts, each as often as it is sampled."""
    for evaluation in planned:
        await feed.evaluate(
            evaluation.name,
            [*prompts[: evaluation.size]] * evaluation.samples,
            temperature=evaluation.temperature,
            min_version=evaluation.version,
        )


async def initial(
    broker: "BrokerClient", planned: Sequence[Planned], evaluator: str | None
) -> None:
    """Waits until training may begin: the initial policy is scored, or its evaluator has it.

    Whoever calls it sets the deadline, and notices where the evaluator is lost.
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
        await asyncio.sleep(POLL_SECONDS)


async def outcome(feed: PromptFeed, planned: Planned) -> Evaluation:
    """Waits for one evaluation; whoever calls it sets the deadline."""
    while True:
        found = await feed.evaluation(planned.name, timeout=10.0)
        if found is not None:
            return found
