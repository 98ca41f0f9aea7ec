"""The stops of `actors.stop`: where a message of the policy ends before its end-of-sequence token.

Engines stop by them to save work, and each rollout is cut by them once more, so that a stop counts
wherever it lies: within a token, or in tokens of which some were sampled before an interruption.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.rollout.chat_rendering import Renderer
from headway.errors import InputError


@dataclass(frozen=True, slots=True)
class Stops:
    """The stops of a recipe, as they apply to one tokenizer."""

    renderer: Renderer
    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    include: bool = False
    """Leave the stop in the text of a message."""
    hidden: dict[int, str] = field(default_factory=dict)
    """Texts of the special tokens among `ids`, which decoding leaves out."""

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return how many tokens of a message end with its first stop; None without a stop."""
        positions = [token_ids.index(stop) for stop in self.ids if stop in token_ids]
        upper = min(positions) + 1 if positions else len(token_ids)
        if not self._has_string(token_ids[:upper]):
            return upper if positions else None
        lower = 1
        while lower < upper:  # the fewest tokens whose text has a stop
            middle = (lower + upper) // 2
            if self._has_string(token_ids[:middle]):
                upper = middle
            else:
                lower = middle + 1
        return upper

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a message of the policy up to its stop, without special tokens."""
        by_id = bool(token_ids) and token_ids[-1] in self.ids
        text = self.renderer.text(token_ids[:-1] if by_id and not self.include else token_ids)
        places = [(text.index(stop), stop) for stop in self.strings if stop in text]
        if not places:
            end = self.hidden.get(token_ids[-1], "") if by_id and self.include else ""
            return text + end
        place, stop = min(places)
        return text[: place + len(stop)] if self.include else text[:place]

    def _has_string(self, token_ids: Sequence[int]) -> bool:
        if not self.strings:
            return False
        text = self.renderer.text(token_ids)
        return any(stop in text for stop in self.strings)


def load_stops(renderer: Renderer, stop: Sequence[str | int], *, include: bool = False) -> Stops:
    """Return the stops of `actors.stop`; a string that is one special token stands for its id.

    Raises InputError for an id that no token has, or a string that is a special token and more.
    """
    if not stop:
        return Stops(renderer)
    tokenizer = renderer.tokenizer
    special = {
        token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ids = [special.get(value, value) if isinstance(value, str) else value for value in stop]
    largest = max(tokenizer.get_vocab().values())
    if unknown := [value for value in ids if isinstance(value, int) and value > largest]:
        raise InputError(
            f"actors.stop has the id {unknown[0]}, and the tokenizer has ids up to {largest}"
        )
    strings = tuple(value for value in ids if isinstance(value, str))
    for string, text in itertools.product(strings, special):
        if text in string:
            raise InputError(
                f"actors.stop has {string!r}, which would never be seen: texts of messages are "
                f"without special tokens such as {text!r}, which can only be a stop by itself"
            )
    numbers = tuple(value for value in ids if isinstance(value, int))
    hidden = {i: text for text, i in special.items() if i in numbers}
    return Stops(renderer, strings, numbers, include, hidden)
