"""Where a message of the policy ends before an end-of-sequence token of the model.

That is at the stops of `actors.stop`, and at the token that ends messages in the chat template.

Engines stop by them to save work, and each rollout is cut by them once more, so that a stop counts
wherever it lies: within a token, or in tokens of which some were sampled before an interruption.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.rollout.chat_rendering import Renderer
from headway.errors import InputError
from queues.records import FinishReason

LONGEST_CHARACTER = 8
"""Tokens before a reply that are decoded with it, where they are of the same message."""


@dataclass(frozen=True, slots=True)
class Stops:
    """The stops of a recipe, as they apply to one tokenizer."""

    renderer: Renderer
    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    include: bool = False
    """Leave the stop in the text of a message."""
    hidden: dict[int, str] = field(default_factory=dict)
    """Texts of the special tokens of `actors.stop` among `ids`."""

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

    def message(
        self, token_ids: Sequence[int], start: int, begun: str, finish_reason: FinishReason
    ) -> str:
        """Return the policy's message of the tokens from `start` on, which had `begun` so."""
        sampled = token_ids[start:]
        ended = finish_reason is FinishReason.STOP and self.find(sampled) is None
        before = token_ids[:start][-LONGEST_CHARACTER:] if begun else ()
        return begun + self.text(sampled, before=before, ended=ended)

    def text(
        self, token_ids: Sequence[int], *, before: Sequence[int] = (), ended: bool = False
    ) -> str:
        """Decode a message of the policy up to its stop, or what follows the tokens `before`.

        Of one that the engine `ended` by itself, a special token at its end is left out.
        """
        last = token_ids[-1] if token_ids else None
        by_id = last in self.ids
        special = (by_id or ended) and last in self.renderer.control.special.values()
        is_cut = special or (by_id and not self.include)
        text = self.renderer.text(token_ids[:-1] if is_cut else token_ids, before)
        places = [(text.index(stop), stop) for stop in self.strings if stop in text]
        if not places:
            return text + (self.hidden.get(token_ids[-1], "") if special and self.include else "")
        place, stop = min(places)
        return text[: place + len(stop)] if self.include else text[:place]

    def _has_string(self, token_ids: Sequence[int]) -> bool:
        if not self.strings:
            return False
        text = self.renderer.text(token_ids)
        return any(stop in text for stop in self.strings)


def load_stops(renderer: Renderer, stop: Sequence[str | int], *, include: bool = False) -> Stops:
    """Return the stops of `actors.stop`, and the token that ends turns in the chat template.

    A string that is one special token stands for its id. Raises InputError for an id that no token
    has, or a string with more than a special token that texts of messages are without.
    """
    special, hidden = renderer.control.special, renderer.hidden
    ids = [special.get(value, value) if isinstance(value, str) else value for value in stop]
    numbers = tuple(value for value in ids if isinstance(value, int))
    largest = max(renderer.tokenizer.get_vocab().values()) if numbers else 0
    if unknown := [number for number in numbers if number > largest]:
        raise InputError(
            f"actors.stop has the id {unknown[0]}, and the tokenizer has ids up to {largest}"
        )
    strings = tuple(value for value in ids if isinstance(value, str))
    for string, text in itertools.product(strings, hidden):
        if text in string:
            raise InputError(
                f"actors.stop has {string!r}, which would never be seen: texts of messages are "
                f"without special tokens such as {text!r}, which can only be a stop by itself"
            )
    named = {i: text for text, i in special.items() if i in numbers}
    ends = {*renderer.turn_end_ids} - {*numbers, renderer.tokenizer.eos_token_id}
    return Stops(renderer, strings, (*numbers, *ends), include, named)
