"""Finds the tool calls in a message of the policy, in time proportional to its length.

    json    <tool_call>{"name": "calculator", "arguments": {"expression": "37*82"}}</tool_call>
    plain   [37*82]      where there is one tool, of one argument, and the markers are "[" and "]"

Hermes and Qwen models write the first, and their chat templates ask for it; Llama models write
"parameters" for "arguments", and others an object as a text.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from actors.foreign_text import unencodable

Style = Literal["json", "plain"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was written, not yet compared with the tools."""

    name: str | None
    """None: the only tool."""
    arguments: dict[str, Any] | str
    """By name, or as the text of the only one."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Text between markers that is no call."""

    why: str


def find_calls(text: str, style: Style, markers: tuple[str, str]) -> list[Call | Unreadable]:
    """Return the calls of a message in their order; a call without an end marker is none."""
    texts = _between(text, *markers)
    return [_read_json(inner) if style == "json" else Call(None, inner) for inner in texts]


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    start = text.find(begin)
    while start >= 0:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            return
        yield text[start + len(begin) : stop]
        start = text.find(begin, stop + len(end))


def _read_json(text: str) -> Call | Unreadable:
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return Unreadable('a call must be an object with "name" and "arguments"')
        keys = sorted(value.keys() - {"name", "id", "type"})
        if len(keys) > 1 or not {*keys} <= {"arguments", "parameters"}:
            extra = ", ".join(map(ascii, keys))
            return Unreadable(f'a call has the keys {extra} where it must have "arguments"')
        arguments = value[keys[0]] if keys else {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        problem = unencodable([value["name"], arguments])
    except (ValueError, RecursionError) as error:
        return Unreadable(f"a call must be JSON: {error}")
    if problem:  # a tool that repeats it would fail the rollout
        return Unreadable(f"a call has {problem}")
    if not isinstance(arguments, dict):
        return Unreadable('"arguments" must be an object')
    return Call(value["name"], arguments)
