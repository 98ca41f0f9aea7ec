"""A question and an answer: the prompt is the only message, and the policy speaks once."""

from actors.environments.environment import Message, Turn
from queues.records import Prompt


class SingleTurn:
    """Ends after the first message of the policy (an `Environment`)."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        return [Message("user", prompt.text)]

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`."""
        return Turn([], 0.0, done=True)
