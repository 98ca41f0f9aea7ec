"""The interface of an environment: what the policy talks to in an episode."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from queues.records import Prompt


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment answers to a message of the policy."""

    messages: Sequence[Message]
    """What the policy sees next; ignored where `done`."""
    reward: float
    """Added to what the rewards of the recipe say."""
    done: bool


class Environment(Protocol):
    """One conversation; built for every rollout, with actors.environment_options as keywords.

    Both methods may be coroutines. Plain ones run in a thread, so they may block.
    """

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The messages that begin the conversation."""
        ...

    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """The answer to a message of the policy."""
        ...
