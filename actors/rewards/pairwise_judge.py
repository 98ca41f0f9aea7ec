"""The reward `pairwise_judge`: a language model compares the completions of a group in pairs."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from actors.errors import root_error
from actors.rewards.find_reward import Metadata
from actors.rewards.llm_judge import LlmJudge
from headway.options import parse_options

INSTRUCTION = """Compare two answers to a question, whatever their order and their length. Reply \
with one number and nothing else: {largest} if the first answer is better, 0 if the second is, and \
half of {largest} if neither is.

Question:
{prompt}

{completion}

Reference:
{answer}"""


def load_pair_judge(setting: str, options: Mapping[str, Any]) -> LlmJudge | None:
    """Return a judge that is asked for pairs, None without options; raise InputError for those."""
    if not options:
        return None
    return parse_options(LlmJudge, setting, {"instruction": INSTRUCTION, **options})


def both_answers(first: str, second: str) -> str:
    """Return two answers under their headings, as the instruction's {completion}."""
    return f"First answer:\n{first}\n\nSecond answer:\n{second}"


class PairwiseJudge(LlmJudge):
    """Asks a language model which of two answers is better; the fields are the options."""

    instruction: str = INSTRUCTION
    """As of `llm_judge`; {completion} is both answers, each under its heading."""

    async def __call__(  # type: ignore[override]
        self, prompt: str, completions: Sequence[str], answer: str | None, metadata: Metadata
    ) -> list[float]:
        """Return the share of its comparisons that each completion wins, a draw as half of one.

        Of n completions each is compared with each other one in both orders, in n(n − 1) calls, so
        that a preference for a place cancels (Zheng et al. 2023, arXiv 2306.05685). The share of
        wins orders completions as the scores of Bradley and Terry's model (1952) do. One completion
        alone gets 0.5.
        """
        pairs = [*permutations(range(len(completions)), 2)]
        texts = [both_answers(completions[i], completions[j]) for i, j in pairs]
        mark = super().__call__
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(mark(prompt, t, answer, metadata)) for t in texts]
        except BaseExceptionGroup as errors:  # what is asked still would cost, and change nothing
            raise root_error(errors) from errors
        wins = [0.0] * len(completions)
        for (first, second), share in zip(pairs, asked, strict=True):
            wins[first] += share.result()
            wins[second] += 1 - share.result()
        comparisons = 2 * (len(completions) - 1)
        return [won / comparisons for won in wins] if comparisons else [0.5]
