"""The environment `single_turn`: one prompt, one answer of the policy."""

from actors.environments.protocol import Message, Turn
from queues.records import Prompt

CONVERSATION = "headway:messages"
"""Key of a prompt's messages in its metadata; chosen so that no column has this name."""


def opening(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt: its source's, or else its text as a user message."""
    messages = prompt.metadata.get(CONVERSATION)
    if messages is None:
        return [Message("user", prompt.text)]
    return [Message(message["role"], message["content"]) for message in messages]


class SingleTurn:
    """Ends after the first message of the policy (an `Environment`)."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        return opening(prompt)

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`."""
        return Turn([], None, done=True)
