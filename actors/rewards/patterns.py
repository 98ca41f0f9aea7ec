"""Rewards for the shape of a completion: a regular expression, or tags in their order."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from actors.rewards.answers import last_match


def regex(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    pattern: str,
) -> float:
    r"""1 where a regular expression is found in the completion; else 0.

    Of several matches of `pattern`, in Python's syntax, the last counts; "." matches new lines too.
    If it has a group named `answer`, that must equal the answer, apart from white space.

    Raises:
        ValueError: The pattern has a group `answer` and the prompt has none.
    """
    compiled = _compiled(pattern)
    last = last_match(compiled, completion)
    if last is None:
        return 0.0
    if "answer" not in compiled.groupindex:
        return 1.0
    if answer is None:
        raise ValueError("the prompt has no answer to compare with the group `answer`")
    return float((last["answer"] or "").strip() == answer.strip())


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


async def tags(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    names: Sequence[str] = ("think", "answer"),
) -> float:
    """1 where the completion is `<think>…</think><answer>…</answer>` and nothing else; else 0.

    Each tag occurs once; between and around the pairs of tags there may be white space.
    """
    rest = completion
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if completion.count(opening) != 1 or completion.count(closing) != 1:
            return 0.0
        before, _, rest = rest.partition(opening)
        _, closed, rest = rest.partition(closing)
        if before.strip() or not closed:
            return 0.0
    return float(not rest.strip())
