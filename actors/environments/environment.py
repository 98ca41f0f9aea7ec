"""The seam between an episode and what the policy talks to, and the environments by name."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.config import ENVIRONMENTS
from actors.dotted_path import check_arguments, load_dotted
from actors.errors import InputError
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
    """One conversation; built without arguments for every rollout.

    Both methods may be coroutines. Plain ones run in a thread, so they may block.
    """

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The messages that begin the conversation."""
        ...

    def step(self, message: Message) -> Turn | Awaitable[Turn]:
        """The answer to a message of the policy."""
        ...


def load_environment(name: str) -> Callable[[], Environment]:
    """The class of an environment.

    Args:
        name: `single_turn`, or "module:Class".

    Raises:
        InputError: No such environment.
    """
    if name == "single_turn":
        from actors.environments.single_turn import SingleTurn

        return SingleTurn
    found = load_dotted(name, setting="actors.environment", known=ENVIRONMENTS)
    missing = [method for method in ("reset", "step") if not hasattr(found, method)]
    if not callable(found) or missing:
        raise InputError(
            f"actors.environment = {name!r} must be a class with the methods reset and step; "
            f"missing: {', '.join(missing) or 'a constructor'}"
        )
    check_arguments(found, setting=f"actors.environment = {name!r}")
    factory: Callable[[], Environment] = found
    return factory
