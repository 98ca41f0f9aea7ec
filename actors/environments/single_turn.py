"""A question and an answer: the prompt says everything, and the policy speaks once."""

from actors.environments.protocol import Message, Turn
from queues.records import Prompt

CONVERSATION = "headway:messages"
"""What a prompt's metadata has its messages under; no name of a column."""


def opening(prompt: Prompt) -> list[Message]:
    """The messages of a prompt: those that its source gave, else its text as one of the user's."""
    given = prompt.metadata.get(CONVERSATION)
    if given is None:
        return [Message("user", prompt.text)]
    return [Message(message["role"], message["content"]) for message in given]


class SingleTurn:
    """Ends after the first message of the policy (an `Environment`)."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        return opening(prompt)

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`."""
        return Turn([], 0.0, done=True)
