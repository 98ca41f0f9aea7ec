"""Rewards that compare text with the prompt's answer.

An equal one counts only if the policy ended it itself: "=12" may be the beginning of "=123".
"""

import re
from collections import defaultdict, deque
from fractions import Fraction

from actors.rewards.find_reward import FINISH_REASON, Metadata, Verifier
from actors.rewards.numbers import last_number, read_number
from queues.records import FinishReason


async def exact_match(
    prompt: str, completion: str, answer: str | None, metadata: Metadata
) -> float:
    """1 where the completion is the answer, apart from white space around it; else 0."""
    return _equal(completion, answer, metadata)


async def last_answer(
    prompt: str, completion: str, answer: str | None, metadata: Metadata
) -> float:
    """1 where what follows the last "=" of the completion is the answer; else 0."""
    gold = required_answer(answer)
    _, separator, last = completion.rpartition("=")
    return _equal(last, gold, metadata) if separator else 0.0


async def numeric_match(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Metadata,
    *,
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
) -> float:
    """1 where the last number of the completion is the answer's; else 0.

    7, 7.0 and 14/2 are equal; actors/README.md has the grammar of numbers. `relative_tolerance` is
    a share of the answer; the larger one counts. Raises ValueError for a prompt without an answer,
    or with one that `read_number` refuses.
    """
    gold = read_number(required_answer(answer))
    number = last_number(completion)
    if number is None or not _is_ended(metadata):
        return 0.0
    allowed = max(Fraction(tolerance), Fraction(relative_tolerance) * abs(gold.value))
    return float(number.distance(gold) <= allowed)


def similarity(prompt: str, answer: str | None, metadata: Metadata) -> Verifier:
    """1 − edits / length of the longer text, from 0 to 1, without white space around both."""
    gold = required_answer(answer).strip()

    def verify(completion: str) -> float:
        text = completion.strip()
        return 1.0 - edits(text, gold) / max(len(text), len(gold), 1)

    return verify


def edits(one: str, other: str) -> int:
    """Count the fewest insertions, deletions and replacements that turn one text into the other.

    The bit-parallel algorithm of Hyyrö (2003, "A bit-vector algorithm for computing Levenshtein and
    Damerau edit distances"), one bit a character of `one`: a column of the table is two integers.
    """
    if not one:
        return len(other)
    positions: dict[str, int] = defaultdict(int)
    for index, character in enumerate(one):
        positions[character] |= 1 << index
    everywhere, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    rising, falling, distance = everywhere, 0, len(one)
    for character in other:
        equal = positions.get(character, 0)
        diagonal = (((equal & rising) + rising) ^ rising) | equal | falling
        up = falling | (everywhere & ~(diagonal | rising))
        down = rising & diagonal
        distance += bool(up & last) - bool(down & last)
        up = (up << 1 | 1) & everywhere
        down = down << 1 & everywhere
        rising = down | (everywhere & ~(diagonal | up))
        falling = up & diagonal
    return distance


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last of the matches that do not overlap; None if there is none."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _equal(text: str, answer: str | None, metadata: Metadata) -> float:
    right = text.strip() == required_answer(answer).strip()
    return float(right and _is_ended(metadata))


def _is_ended(metadata: Metadata) -> bool:
    """Return True if the policy ended the completion; a data set may have a `finish_reason` too."""
    reason: str | None = metadata.get(FINISH_REASON, metadata.get("finish_reason"))
    return reason == FinishReason.STOP


def required_answer(answer: str | None) -> str:
    """Return the answer of a prompt; raise ValueError if it has none, or an empty one."""
    if answer is None:
        raise ValueError("the prompt has no answer to compare with")
    if not answer.strip():
        raise ValueError("the prompt has an empty answer: no expression or text to compare with")
    return answer
