"""Compares the answers of two policies, by a judge that is asked in both orders, or by rewards."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from actors.errors import RolloutFailed
from actors.rewards.llm_judge import LlmJudge
from deploy.config.run_config import RunConfig
from deploy.report.score_intervals import Verdict
from headway.options import parse_options
from queues.records import Prompt

INSTRUCTION = """Compare two answers to a question, whatever their order and their length. Reply \
with one number and nothing else: {largest} if the first answer is better, 0 if the second is, and \
half of {largest} if neither is.

Question:
{prompt}

{completion}

Reference:
{answer}"""


class Sample(NamedTuple):
    """A rollout of a problem."""

    reward: float
    text: str
    """The completion."""
    mark: float = 0.0
    """Mark by which the best of several is chosen."""


Played = Mapping[str, Sequence[list[Sample] | RolloutFailed]]
"""By held-out set, the rollouts of each problem, or the first error of one."""


def load_judge(config: RunConfig) -> LlmJudge | None:
    """Return the judge of `heldout.judge`; None without one. Raises InputError for its options."""
    if config.heldout is None or not config.heldout.judge:
        return None
    options = {"instruction": INSTRUCTION, **config.heldout.judge}
    return parse_options(LlmJudge, "heldout.judge", options)


def compare(
    judge: LlmJudge | None, sets: Mapping[str, Sequence[Prompt]], ours: Played, theirs: Played
) -> dict[str, list[list[Verdict] | RolloutFailed]]:
    """Return the verdicts on the rollouts of each problem, or the first error among them.

    Without a judge, the answer with the higher reward is better.
    """

    async def ask(prompt: Prompt, first: Sample, second: Sample) -> float:
        if judge is None:
            return 0.5 if first.reward == second.reward else float(first.reward > second.reward)
        both = f"First answer:\n{first.text}\n\nSecond answer:\n{second.text}"
        return await judge(prompt.text, both, prompt.answer, prompt.metadata)

    async def verdict(prompt: Prompt, our: Sample, their: Sample) -> Verdict:
        return Verdict(*await asyncio.gather(ask(prompt, our, their), ask(prompt, their, our)))

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
