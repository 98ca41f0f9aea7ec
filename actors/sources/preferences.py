"""Preference sets, in the forms of Hugging Face's data sets and of TRL.

A pair is (prompt, chosen, rejected). Without a prompt it is what both begin with: the messages that
they share, or, of texts, the words. A completion that is judged alone, with a label for KTO, is a
pair whose other side is empty. Completions are texts, or messages from the assistant's on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from actors.environments.protocol import Message
from actors.sources.examples import Example, ExampleKind, Messages, check_texts
from actors.sources.public_formats import PROMPTS
from actors.sources.rows import ROLES, WRITTEN, Row, read_messages
from headway.user_code import shown

TURN = re.compile(r"\n\n(Human|Assistant):")
"""Beginning of a turn in the texts of Anthropic's HH-RLHF."""
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
BEGUN = Message("assistant", "")
"""Message that ends the prompts of some sets, where the reply begins."""
LABELS = {"true": True, "1": True, "false": False, "0": False}
OTHERS = frozenset(PROMPTS) - {"prompt"}
FORMS = "prompt, chosen and rejected; or chosen and rejected; or prompt, completion and label"


@dataclass(frozen=True, slots=True)
class PreferenceKind(ExampleKind):
    """Pairs and judged completions of a prompt."""

    def read_row(self, row: Row) -> Example:
        """Return the pair in a row of a table; raise ValueError with what is wrong with it."""
        given = row if isinstance(row, Mapping) else {}
        names = (*self.fields, "completion", "label")
        prompt, chosen, rejected, completion, label = map(given.get, names)
        system = given.get("system")
        texts = (prompt, system, chosen if completion is None else completion)
        if system and all(isinstance(text, str) for text in texts):
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        if completion is not None and label is not None:
            desirable = LABELS.get(str(label).lower())
            if desirable is None:
                raise ValueError(f"label is {shown(label)}, must be true or false")
            chosen, rejected = (completion, None) if desirable else (None, completion)
        elif chosen is None or rejected is None:
            raise ValueError(f"expected an object with {FORMS}: {shown(row)}")
        elif prompt is None and isinstance(chosen, str) and (others := given.keys() & OTHERS):
            raise ValueError(f"there is no field prompt; name {min(others)} so, if that is it")
        return self.read((prompt, chosen, rejected))

    def read(self, value: Any) -> Example:
        """Return a pair, which user code may have made; raise ValueError if it is none.

        A completion that is judged alone has None on its other side.
        """
        if not isinstance(value, tuple) or len(value) != len(self.fields):
            raise ValueError(f"{shown(value)} must be a tuple of {', '.join(self.fields)}")
        check_texts(value)
        prompt, *given = value
        sides = [*zip(self.fields[1:], given, strict=True)]
        replies = ["" if side is None else _parsed(name, side) for name, side in sides]
        if replies[0] == replies[1]:
            raise ValueError(f"chosen and rejected are both {shown(given[0])}")
        is_whole = all(isinstance(x, tuple) and x[0].role != "assistant" for x in replies)
        if (prompt is None and None not in given) or (isinstance(prompt, str) and is_whole):
            opening, *replies = _parted(*replies)
        else:
            opening = _parsed("prompt", prompt)
        if isinstance(opening, tuple) and opening[1:] and opening[-1] == BEGUN:
            opening = opening[:-1]
        for (name, side), reply in zip(sides, replies, strict=True):
            if side is not None:
                _check_reply(name, reply)
        return opening, *replies


PREFERENCE_SETS = PreferenceKind(
    "prefer.pairs", "preferences", ("prompt", "chosen", "rejected"), "preference pairs"
)


def judged_completions(pairs: Iterable[Example]) -> Iterator[Example]:
    """Yield the sides of pairs alone, each as a pair whose other side is empty."""
    for prompt, chosen, rejected in pairs:
        yield from ((prompt, *sides) for sides in ((chosen, ""), ("", rejected)) if any(sides))


def _parsed(name: str, value: Any) -> str | Messages:
    """Return a text as it is, a list of messages, or a text of HH-RLHF as messages."""
    if isinstance(value, str):
        if WRITTEN.match(value):
            raise ValueError(f"{name} is the text of a list, must be the list itself, as in JSONL")
        _, *parts = TURN.split(value) if TURN.match(value) else [value]
        turns = zip(parts[0::2], parts[1::2], strict=True)
        return tuple(Message(SPEAKERS[who], said.strip()) for who, said in turns) or value
    messages = read_messages(value)
    if messages is None:
        raise ValueError(
            f"{name} is {shown(value)}, must be a text or messages, each of a role "
            f"({', '.join(ROLES)}) and a content"
        )
    return messages


def _check_reply(name: str, reply: str | Messages) -> None:
    """Require a text, or messages that the assistant begins and ends."""
    if not reply:
        raise ValueError(f"{name} is empty, or has nothing after what both begin with")
    messages = () if isinstance(reply, str) else reply
    roles = [message.role for message in messages]
    if roles and {roles[0], roles[-1]} != {"assistant"}:
        raise ValueError(
            f"{name} has messages of {', '.join(roles)} after the prompt; must begin and end with "
            "the assistant"
        )
    if BEGUN in messages:
        raise ValueError(f"{name}: no message of the assistant may be empty")


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
