"""Mathematical equality with the answer, by math-verify: LaTeX, fractions, sets, intervals."""

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from actors.rewards.answers import required_answer


def math_verify(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """1 where the last expression of the completion equals the answer; else 0.

    The caller sets the deadline: math-verify's own deadlines need the main thread.

    Raises:
        ValueError: The prompt has no answer, or one that holds no expression.
    """
    gold = parse(required_answer(answer), parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))
