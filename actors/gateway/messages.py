"""Messages of a chat as clients send them, for chat templates and for comparison.

Clients send a conversation back with other white space at the ends of messages, other ids of tool
calls, arguments written otherwise, and without the policy's reasoning: `ChatMessage.compared` is
what is left of a message that must be the same.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.foreign_text import not_json

KEPT = "tool_call_id", "name"
"""Further fields of messages that chat templates read."""
REASONING = "reasoning", "reasoning_content"
"""Names under which clients send the policy's reasoning back, and templates read it."""


@dataclass(frozen=True, slots=True)
class ChatMessage(Message):
    """One message of a chat, perhaps with calls of tools."""

    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    """As in OpenAI's API, but with parsed arguments, unless they are no JSON object."""
    further: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return what a chat template is given of it."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content, **self.further}
        if self.calls:
            fields["tool_calls"] = [*self.calls]
        return fields | (dict.fromkeys(REASONING, self.reasoning) if self.reasoning else {})

    def changed(self, change: Callable[[str], str]) -> Self:
        """Return the message with each of its texts changed, also those within calls of tools."""
        return replace(
            self,
            content=change(self.content),
            reasoning=change(self.reasoning),
            calls=tuple({**c, "function": _changed(c["function"], change)} for c in self.calls),
            further=_changed(self.further, change),
        )

    @property
    def compared(self) -> str:
        """The message as it is compared with others."""
        functions = [call["function"] for call in self.calls]
        calls = [[function["name"], function["arguments"]] for function in functions]
        return json.dumps([self.role, self.content.strip(), calls], sort_keys=True)

    @property
    def outline(self) -> str | None:
        """Its content and the names of its calls; None where it has no call."""
        names = [call["function"]["name"] for call in self.calls]
        return json.dumps([self.content.strip(), names]) if names else None

    @property
    def malformed(self) -> bool:
        """True if the arguments of a call are no JSON object, which some clients mend."""
        return any(isinstance(call["function"]["arguments"], str) for call in self.calls)


def read_message(message: Mapping[str, Any]) -> ChatMessage:
    """Return a message of OpenAI's form; raise PromptRefused for content that is not text."""
    role, calls = message.get("role"), message.get("tool_calls") or ()
    if not isinstance(role, str):
        raise PromptRefused(f"a message has the role {role!r:.80}, must have a text")
    reasoning = next((text for name in REASONING if (text := message.get(name))), "")
    return ChatMessage(
        "system" if role == "developer" else role,  # its later name, which templates do not know
        _text(message.get("content")),
        _text(reasoning),
        tuple(_read_call(call) for call in calls),
        {name: value for name in KEPT if isinstance(value := message.get(name), str)},
    )


def _text(content: Any) -> str:
    """Join the parts of a content, each on lines of its own, as vLLM does."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise PromptRefused(f"content is {content!r:.80}, must be a text or a list of its parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptRefused(f"content has a part of type {kind!r:.80}, must be text alone")
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptRefused(f'a call of a tool is {call!r:.80}, must have a function with a "name"')
    arguments = _parsed(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a call as an object; what is none stays as it is written."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        value = None
    fits = isinstance(value, Mapping) and not not_json(value)
    return value if fits else str(arguments).strip()


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Change each text in a value of JSON's types."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(inner, change) for key, inner in value.items()}
    return [_changed(inner, change) for inner in value] if isinstance(value, list) else value
