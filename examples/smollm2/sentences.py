"""A short task for a small chat model: one sentence with three given words.

Replace `problem_at` and `score` to try another task; `headway try` prints what the model says.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from actors.environments.protocol import Message
from actors.environments.single_turn import conversation
from actors.sources.resumable import Problem, ProceduralSource

TRAINED = (
    "apple river stone green cloud bread chair music horse light tiger plant brown paper dream "
    "salt north winter candle bottle window garden silver basket pencil rocket ladder monkey "
    "orange bridge doctor engine flower hammer island jacket kitchen lemon market needle"
)
HELDOUT = (
    "ocean pillow queen rabbit school table uncle village water yellow button castle dinner "
    "eagle farmer guitar honey letter mirror night"
)
"""Words of held-out problems, which are never trained."""


def problem_at(split: int | str, position: int) -> Problem:
    """Return three words to use; the same arguments always give the same problem."""
    words = HELDOUT if split == "heldout" else TRAINED
    text = ", ".join(random.Random(f"{split}/{position}").sample(words.split(), 3))
    messages = [Message("system", "Write one sentence with these words."), Message("user", text)]
    return Problem(text, text, metadata=conversation(messages))


class Sentences(ProceduralSource):
    """Endless triples of words; held-out ones are of words that are never trained."""

    def __init__(self, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        super().__init__(
            "sentences",
            lambda position: problem_at(seed, position),
            lambda position: problem_at("heldout", position),
            **split,
        )


def score(prompt: str, completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """Return the share of the words that the sentence has, with any ending."""
    words = answer.split(", ")
    return sum(bool(re.search(rf"\b{word}", completion.lower())) for word in words) / len(words)
