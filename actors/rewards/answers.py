"""Rewards that compare text with the prompt's answer.

An answer counts only if the policy ended it itself: "=12" may be the beginning of "=123". All of
them take time proportional to the text, and so run in the process of the actor.
"""

import re
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from queues.records import FinishReason

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:/\d+)?"
)
"""A number as people and programs write it: -3, 1,234.5, .5, 6.02e23, 3/4."""

LONGEST = 1000
"""Most characters of a number."""


async def exact_match(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """1 where the completion is the answer, apart from white space around it; else 0."""
    return _equal(completion, answer, metadata)


async def last_answer(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """1 where what follows the last "=" of the completion is the answer; else 0."""
    _, separator, last = completion.rpartition("=")
    return _equal(last, answer, metadata) if separator else 0.0


async def numeric_match(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
) -> float:
    """1 where the last number of the completion is the answer's; else 0.

    7, 7.0 and 14/2 are equal. `relative_tolerance` is a share of the answer; the larger one counts.

    Raises:
        ValueError: The prompt has no answer, or one that holds no number.
    """
    gold = _last_number(required_answer(answer))
    if gold is None:
        raise ValueError(f"numeric_match finds no number in the answer {answer!r}")
    number = _last_number(completion)
    if number is None or metadata["finish_reason"] != FinishReason.STOP:
        return 0.0
    allowed = max(Fraction(tolerance), Fraction(relative_tolerance) * abs(gold))
    return float(abs(number - gold) <= allowed)


def _last_number(text: str) -> Fraction | None:
    last = last_match(NUMBER, text)
    if last is None or len(last[0]) > LONGEST:
        return None
    over, _, under = last[0].replace(",", "").partition("/")
    if under and not int(under):
        return None
    return Fraction(over) / int(under or 1)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last of the matches that do not overlap; None if there is none."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _equal(text: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    right = text.strip() == required_answer(answer).strip()
    return float(right and metadata["finish_reason"] == FinishReason.STOP)


def required_answer(answer: str | None) -> str:
    """Return the answer of a prompt; raise ValueError if it has none."""
    if answer is None:
        raise ValueError("the prompt has no answer to compare with")
    return answer
