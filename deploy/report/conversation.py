"""A rollout as messages: who says each token, its calls of tools, and where its history forks.

Roles come from the tokens that the chat template writes before messages; the same texts within a
message are other tokens. Without a chat template there are the prompt, the replies and the rest.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import PLACEHOLDER, POLICY, USER, Renderer
from actors.rollout.stops import LONGEST_CHARACTER
from actors.rollout.text_encoding import encode
from headway.clean_text import without_secrets
from headway.errors import InputError
from queues.records import Rollout
from queues.segments import paths, spans

MARK = "\ue001"
"""Stands for the message whose header is looked for."""


class Token(NamedTuple):
    """A token as a page shows it; `at` is its index in the rollout."""

    at: int
    text: str
    is_header: bool
    """It is of what the template writes before a message."""
    forks: Sequence[int]
    """Segments that go on after it with another history."""


class ShownSegment(NamedTuple):
    """The tokens of a segment as messages, and the segments that follow a part of its path."""

    number: int
    prefix: int
    """Tokens of its path before its own."""
    messages: list[tuple[str, list[tuple[bool, list[Token]]]]]
    """Role and parts of each; a part is a call of a tool, or not, and its tokens."""
    children: "list[ShownSegment]"


def show_segments(
    rollout: Rollout, renderer: Renderer, markers: tuple[str, str]
) -> list[ShownSegment]:
    """Return the segments that begin a history; `markers` are the texts around a call of a tool."""
    headers, routes, ids = role_headers(renderer), paths(rollout), rollout.token_ids
    own = spans(rollout.segments, len(ids))
    call = re.compile(".*?".join(map(re.escape, markers)), re.DOTALL)
    owner = [number for number, span in enumerate(own) for _ in range(*span)]
    forks, siblings = defaultdict[int, list[int]](list), [roots := list[ShownSegment]()]
    shown = [ShownSegment(0, 0, [], [])]
    for number, (_, parent, prefix) in enumerate(rollout.segments, 1):
        shown.append(ShownSegment(number, prefix, [], []))
        siblings.append(roots)
        if prefix:
            last = int(routes[parent][prefix - 1])
            forks[last].append(number)
            siblings[number] = shown[owner[last]].children
    for segment, route, (start, end) in zip(shown, routes, own, strict=True):
        path, sampled = [ids[i] for i in route], [rollout.loss_mask[i] for i in route]
        speakers = speakers_of(path, sampled, headers)[segment.prefix :]
        first = [i for i, (_, opens, _) in enumerate(speakers, start) if opens or i == start]
        texts = token_texts(path, segment.prefix, renderer)
        for begin, stop in zip(first, [*first[1:], end], strict=True):
            clean = hidden(texts[begin - start : stop - start])
            role = speakers[begin - start][0]
            calls = tokens_within(clean, call) if role == "assistant" else ()
            tokens = [
                (
                    i in calls,
                    Token(begin + i, text, speakers[begin - start + i][2], forks[begin + i]),
                )
                for i, text in enumerate(clean)
            ]
            parts = [(k, [t for _, t in part]) for k, part in groupby(tokens, lambda x: x[0])]
            segment.messages.append((role, parts))
        siblings[segment.number].append(segment)
    return roots


def role_headers(renderer: Renderer) -> list[tuple[str, list[int]]]:
    """Return roles and the ids that the chat template writes before their messages, longest first.

    Roles that it refuses, and those without such ids, are left out.
    """
    conversations = {
        "system": [Message("system", MARK), USER],
        "user": [USER, POLICY, Message("user", MARK)],
        "tool": [USER, POLICY, Message("tool", MARK)],
        "assistant": [USER, Message("assistant", MARK), USER],
    }
    headers = []
    for role, messages in conversations.items() if renderer.templated else ():
        with suppress(PromptRefused, InputError):
            end = renderer.turn_end().strip() or PLACEHOLDER
            before = renderer.written(messages, reply=False).partition(MARK)[0]
            if ids := encode(renderer.tokenizer, before.rpartition(end)[2].strip()):
                headers.append((role, ids))
    return sorted(headers, key=lambda header: -len(header[1]))


def speakers_of(
    ids: Sequence[int], sampled: Sequence[bool], headers: Sequence[tuple[str, list[int]]]
) -> list[tuple[str, bool, bool]]:
    """Return for each token of a path its role, and True if it begins a message, or is a header."""
    speakers, role, header_end = list[tuple[str, bool, bool]](), "user", 0
    for i, is_sampled in enumerate(sampled):
        before, opens = role, i == 0
        if is_sampled:
            role = "assistant"
        elif not headers:
            role = "user" if role == "user" else "environment"
        elif i >= header_end:
            for name, header in headers:
                if ids[i : i + len(header)] == header and not any(sampled[i : i + len(header)]):
                    role, opens, header_end = name, True, i + len(header)
                    break
        speakers.append((role, opens or role != before, i < header_end))
    return speakers


def token_texts(ids: list[int], start: int, renderer: Renderer) -> list[str]:
    """Return the text that each token from `start` on adds; "" for most parts of a character."""
    texts, first, read = list[str](), max(0, start - LONGEST_CHARACTER), start
    for end in range(start + 1, len(ids) + 1):
        text = renderer.decoded(ids[first:end])
        if text.endswith("\ufffd") and end < min(len(ids), read + LONGEST_CHARACTER):
            texts.append("")
            continue
        texts.append(text[len(renderer.decoded(ids[first:read])) :])
        first, read = read, end
    return texts


def hidden(texts: list[str]) -> list[str]:
    """Return the texts of a message's tokens; one with a secret is all in its first, without it."""
    whole = "".join(texts)
    clean = without_secrets(whole)
    return texts if clean == whole else [clean, *[""] * (len(texts) - 1)]


def tokens_within(texts: Sequence[str], pattern: re.Pattern[str]) -> set[int]:
    """Return the indices of the tokens of a message that are in a match of a pattern."""
    places = [match.span() for match in pattern.finditer("".join(texts))]
    within, at = set(), 0
    for i, text in enumerate(texts):
        if any(at < stop and begin < at + len(text) for begin, stop in places):
            within.add(i)
        at += len(text)
    return within
