"""Rewards that compare text with the prompt's answer.

An answer counts only if the policy ended it itself: the start of "=12" may have become "=123".
"""

from collections.abc import Mapping
from typing import Any

from queues.records import FinishReason


async def exact_match(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """1 where the completion is the answer, apart from white space around it; else 0."""
    return _equal(completion, answer, metadata)


async def last_answer(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """1 where what follows the last "=" of the completion is the answer; else 0."""
    _, found, last = completion.rpartition("=")
    return _equal(last, answer, metadata) if found else 0.0


def _equal(text: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    if answer is None:
        raise ValueError("the prompt has no answer to compare with")
    return float(metadata["finish_reason"] == FinishReason.STOP and text.strip() == answer.strip())
