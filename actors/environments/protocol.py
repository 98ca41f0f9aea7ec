"""The interface of an environment, the partner of the policy in a conversation."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from queues.records import Prompt

Recall = Callable[[int, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Returns the result of a call, given its index in its message and how to make it: that which is
recorded, or else what making it returns, a JSON value that is recorded first."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str

    def fields(self) -> dict[str, Any]:
        """Return what a chat template is given of it."""
        return {"role": self.role, "content": self.content}

    def changed(self, change: Callable[[str], str]) -> Self:
        """Return the message with each of its texts changed."""
        return replace(self, content=change(self.content))


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer of an environment to a message of the policy."""

    messages: Sequence[Message]
    """Messages that the policy sees next; ignored where `done`."""
    reward: float | None
    """Added to the rewards of the recipe; None where the turn has none. With
    learner.process_rewards a turn that earned 0 counts, and one without a reward does not."""
    done: bool


class Environment(Protocol):
    """One conversation; every rollout builds one, with actors.environment_options as keywords.

    Both methods may be coroutines. Plain ones run in a thread, so they may block.
    """

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Return the messages that begin the conversation."""

    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """Answer a message of the policy."""
