"""Compares the answers of two policies, by a judge that is asked in both orders, or by rewards."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from actors.errors import RolloutFailed
from actors.rewards.find_reward import Metadata
from actors.rewards.pairwise_judge import both_answers
from deploy.report.score_intervals import Verdict
from queues.records import Prompt


class Sample(NamedTuple):
    """A rollout of a problem."""

    reward: float
    text: str
    """The completion."""
    mark: float = 0.0
    """Mark by which the best of several is chosen."""


Judge = Callable[[str, str, str | None, Metadata], Awaitable[float]]
"""An `LlmJudge` that is asked for pairs: its mark is 1 where the first answer is better."""
Played = Mapping[str, Sequence[list[Sample] | RolloutFailed]]
"""By held-out set, the rollouts of each problem, or the first error of one."""


async def judged(
    judge: Judge, prompt: Prompt, answer: str, other: str, principle: str | None = None
) -> Verdict:
    """Return the marks of a judge for an answer beside another one, with each of them first."""
    by = "" if principle is None else f"Principle to compare by:\n{principle}\n\n"

    async def ask(first: str, second: str) -> float:
        both = both_answers(first, second)
        return await judge(prompt.text, by + both, prompt.answer, prompt.metadata)

    return Verdict(*await asyncio.gather(ask(answer, other), ask(other, answer)))


def compare(
    judge: Judge | None, sets: Mapping[str, Sequence[Prompt]], ours: Played, theirs: Played
) -> dict[str, list[list[Verdict] | RolloutFailed]]:
    """Return the verdicts on the rollouts of each problem, or the first error among them.

    Without a judge, the answer with the higher reward is better.
    """

    async def verdict(prompt: Prompt, our: Sample, their: Sample) -> Verdict:
        if judge is not None:
            return await judged(judge, prompt, our.text, their.text)
        mark = 0.5 if our.reward == their.reward else float(our.reward > their.reward)
        return Verdict(mark, 1 - mark)

    async def verdicts(
        prompt: Prompt, our: list[Sample] | RolloutFailed, their: list[Sample] | RolloutFailed
    ) -> list[Verdict] | RolloutFailed:
        if isinstance(our, RolloutFailed):
            return our
        if isinstance(their, RolloutFailed):
            return their
        try:
            return await asyncio.gather(
                *(verdict(prompt, *pair) for pair in zip(our, their, strict=True))
            )
        except RolloutFailed as error:
            return error

    async def of_sets() -> dict[str, list[list[Verdict] | RolloutFailed]]:
        return {
            name: await asyncio.gather(*map(verdicts, prompts, ours[name], theirs[name]))
            for name, prompts in sets.items()
        }

    return asyncio.run(of_sets())
