"""Held-out evaluation through the prompt queue: which versions, which problems, and the scores.

All evaluations of a run are queued at its start; the broker leases each one as soon as an engine
serves its version. Evaluation does not stop training: an engine may take a newer version half-way,
so every score names the lowest and highest version that sampled it. At the first and the last
version nothing else is trained, and both are the same. With `heldout.pinned` they are the same
everywhere: one actor evaluates and does nothing else, and stays at a version until it is done;
training waits until it has the first version, and not for the score.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.config import HeldoutConfig
from actors.rollout.actor_statistics import engine_id_of
from queues.protocols import PromptFeed
from queues.records import Evaluation, Prompt, Purpose

if TYPE_CHECKING:
    from queues.ray_broker import BrokerClient

GREEDY, SAMPLED = "greedy", "sampled"
POLL_SECONDS = 0.2
"""Between looks at which engines serve a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One evaluation of a run."""

    version: int
    kind: str
    temperature: float
    size: int
    """Problems."""
    samples: int = 1
    """Of each problem."""

    @property
    def name(self) -> str:
        """Its name in the broker."""
        return f"{self.kind}@{self.version}"


def plan(config: HeldoutConfig, *, steps: int, temperature: float) -> list[Planned]:
    """The evaluations of a run, by version: every `every` versions, and larger at both ends."""
    versions = sorted({0, *range(config.every, steps, config.every), steps})
    kinds = [(GREEDY, 0.0)] + ([(SAMPLED, temperature)] if config.sampled else [])
    return [
        Planned(
            version=version,
            kind=kind,
            temperature=heat,
            samples=config.samples if kind == SAMPLED else 1,
            size=(config.final_size or config.size) if version in (0, steps) else config.size,
        )
        for version in versions
        for kind, heat in kinds
    ]


def purpose(config: HeldoutConfig | None, actor: int, actors: int) -> Purpose | None:
    """What the actor of this number, of so many, leases; None where all of them do everything."""
    found = evaluator(config, actors)
    if found is None:
        return None
    return Purpose.EVALUATE if engine_id_of(actor) == found else Purpose.TRAIN


def evaluator(config: HeldoutConfig | None, actors: int) -> str | None:
    """Id of the engine that only evaluates; None where all of them do everything."""
    return engine_id_of(actors - 1) if config is not None and config.pinned else None


def pinned_seconds(config: HeldoutConfig | None, actor: int, actors: int) -> float:
    """How long the actor of this number may keep a version, since it evaluates it."""
    evaluates = purpose(config, actor, actors) is Purpose.EVALUATE
    return config.pinned_seconds if config is not None and evaluates else 0.0


def scores_first(unfinished: Sequence[str]) -> bool:
    """Whether one of these evaluations is of the initial policy: no prompt comes before its end.

    Example:
        >>> scores_first(["greedy@0", "greedy@50"]), scores_first(["greedy@10", "sampled@50"])
        (True, False)
    """
    return any(name.endswith("@0") for name in unfinished)


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


def by_version(planned: Sequence[Planned]) -> Iterator[tuple[int, list[Planned]]]:
    """The evaluations of each version, in order."""
    for version in sorted({evaluation.version for evaluation in planned}):
        yield version, [p for p in planned if p.version == version]
