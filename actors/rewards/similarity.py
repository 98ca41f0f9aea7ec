"""The reward `similarity`: edit distance between a completion and the answer."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from actors.rewards.answers import required_answer


def similarity(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """1 − edits / length of the longer text, from 0 to 1; white space around both is left out.

    Raises:
        ValueError: The prompt has no answer.
    """
    text, gold = completion.strip(), required_answer(answer).strip()
    return 1.0 - edits(text, gold) / max(len(text), len(gold), 1)


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
