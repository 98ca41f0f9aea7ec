"""The environment `single_turn`: one prompt, one answer of the policy."""

from collections.abc import Sequence

from actors.environments.protocol import Message, Turn
from queues.records import Prompt

CONVERSATION = "headway:messages"
"""Key of a prompt's messages in its metadata; chosen so that no column has this name."""


def opening(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt: its source's, or else its text as a user message."""
    messages = prompt.metadata.get(CONVERSATION)
    if messages is None:
        return as_messages(prompt.text)
    return [Message(message["role"], message["content"]) for message in messages]


def conversation(messages: Sequence[Message]) -> dict[str, list[dict[str, str]]]:
    """Return the metadata of a prompt that begins with these messages, as JSON values."""
    return {CONVERSATION: [{"role": m.role, "content": m.content} for m in messages]}


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """Return a prompt as messages: a text is that of the user."""
    return [Message("user", prompt)] if isinstance(prompt, str) else [*prompt]


class SingleTurn:
    """Ends after the first message of the policy (an `Environment`)."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        return opening(prompt)

    async def step(self, message: Message) -> Turn:
        return Turn([], None, done=True)
