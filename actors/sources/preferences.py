"""Preference sets, in the forms of Hugging Face's data sets and of TRL.

A pair is (prompt, chosen, rejected). Without a prompt it is what both begin with: the messages that
they share, or, of texts, the words. A completion that is judged alone, with a label for KTO, is a
pair whose other side is empty. Completions are texts, or messages from the assistant's on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from actors.environments.protocol import Message
from actors.sources.examples import (
    BEGUN,
    SYSTEM,
    Example,
    ExampleKind,
    Messages,
    check_reply,
    with_system,
)
from actors.sources.public_formats import PROMPTS
from actors.sources.rows import text_or_messages
from headway.user_code import shown

TURN = re.compile(r"\n\n(Human|Assistant):")
"""Beginning of a turn in the texts of Anthropic's HH-RLHF."""
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
LABELS = {"true": True, "1": True, "1.0": True, "yes": True,
          "false": False, "0": False, "0.0": False, "no": False}  # fmt: skip
OTHERS = frozenset(PROMPTS) - {"prompt"}


class PreferenceKind(ExampleKind):
    """Pairs and judged completions of a prompt."""

    method = "preferences"
    fields = ("prompt", "chosen", "rejected")
    forms = "prompt, chosen and rejected; or chosen and rejected; or prompt, completion and label"

    def _values(self, row: Mapping[str, Any]) -> Any:
        names = (*self.fields, "completion", "label")
        prompt, chosen, rejected, completion, label = map(row.get, names)
        if any(map(_is_whole, (chosen, rejected, completion))):
            sides = chosen, rejected, completion
            chosen, rejected, completion = (with_system(side, row.get(SYSTEM)) for side in sides)
        else:
            prompt = with_system(prompt, row.get(SYSTEM))
        if completion is not None and label is not None:
            desirable = LABELS.get(str(label).strip().lower())
            if desirable is None:
                raise ValueError(f"label is {shown(label)}, must be true or false")
            return (prompt, completion, None) if desirable else (prompt, None, completion)
        if chosen is None or rejected is None:
            return None
        if prompt is None and isinstance(chosen, str) and (others := row.keys() & OTHERS):
            raise ValueError(
                f'there is no field prompt; set the option prompt_field = "{min(others)}", if it is'
            )
        return prompt, chosen, rejected

    def _example(self, value: Any) -> Example:
        """Return a pair; a completion that is judged alone has None on its other side."""
        prompt, *given = self._unpacked(value)
        alone = given.count(None) == 1
        names = ("completion",) * 2 if alone else self.fields[1:]
        sides = [*zip(names, given, strict=True)]
        replies = ["" if side is None else _parsed(name, side) for name, side in sides]
        if not alone and replies[0] == replies[1]:
            both = f"chosen and rejected are both {shown(given[0])}"
            raise ValueError(both if prompt is None else f"{both} for the prompt {shown(prompt)}")
        is_whole = all(isinstance(x, tuple) and x[0].role != "assistant" for x in replies)
        if (prompt is None and not alone) or (isinstance(prompt, str) and is_whole):
            opening, *replies = _parted(*replies)
        else:
            opening = _parsed("prompt", prompt)
        if isinstance(opening, tuple) and opening[1:] and opening[-1] == BEGUN:
            opening = opening[:-1]
        for (name, side), reply in zip(sides, replies, strict=True):
            if side is not None:
                check_reply(name, reply)
        return opening, *replies


PREFERENCES = PreferenceKind("prefer.pairs")
REWARD_MODEL_PAIRS = PreferenceKind("reward_model.pairs")


def judged_completions(pairs: Iterable[Example]) -> Iterator[Example]:
    """Yield the sides of pairs alone, each as a pair whose other side is empty."""
    for prompt, chosen, rejected in pairs:
        yield from ((prompt, *sides) for sides in ((chosen, ""), ("", rejected)) if any(sides))


def _is_whole(side: Any) -> bool:
    """Return True for messages that the prompt's own ones begin."""
    first = side[0] if isinstance(side, list) and side else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _parsed(name: str, value: Any) -> str | Messages:
    """Return a text as it is, a list of messages, or a text of HH-RLHF as messages."""
    given = text_or_messages(name, value)
    if not isinstance(given, str) or not TURN.match(given):
        return given
    _, *parts = TURN.split(given)
    turns = zip(parts[0::2], parts[1::2], strict=True)
    return tuple(Message(SPEAKERS[who], said.strip()) for who, said in turns)


def _parted(chosen: Any, rejected: Any) -> tuple[str | Messages, ...]:
    """Return what both begin with, in whole words or messages, and the rest of each."""
    if type(chosen) is not type(rejected):
        raise ValueError("chosen and rejected must both be texts, or both messages")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shorter = min(len(chosen), len(rejected))
    common = next((at for at, (one, other) in pairs if one != other), shorter)
    if isinstance(chosen, str):
        while common and not all(t[common : common + 1].isspace() for t in (chosen, rejected)):
            common -= 1
    if not common:
        raise ValueError(
            f"there is no prompt, and chosen and rejected begin differently: {shown(chosen)} and "
            f"{shown(rejected)}"
        )
    return chosen[:common], chosen[common:], rejected[common:]
