"""The seam between an episode and what the policy talks to, and the environments by name."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from actors.config import ENVIRONMENTS
from actors.errors import InputError
from actors.user_code.dotted_path import check_arguments, load_dotted
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


def load_environment(
    name: str, options: dict[str, Any] | None = None, *, code_execution: str = "off"
) -> Callable[[], Environment]:
    """What makes a conversation of an environment.

    Args:
        name: `single_turn`, `tools`, `verifiers:ID`, or "module:Class".
        options: Its keywords.
        code_execution: Whether tools may run what the policy writes.

    Raises:
        InputError: No such environment, or options that it does not have.
    """
    options = options or {}
    if name == "single_turn":
        from actors.environments.single_turn import SingleTurn

        check_arguments(SingleTurn, setting=_with(name, options), options=options)
        return SingleTurn
    if name == "tools":
        from actors.environments.tools import ToolBox, Tools

        return partial(Tools, ToolBox(options, code_execution))
    if name.startswith("verifiers:"):
        from actors.environments.verifiers_environment import Conversation, load_verifiers

        played = load_verifiers(name, options, setting="actors.environment")
        return partial(Conversation, played)
    found = load_dotted(name, setting="actors.environment", known=ENVIRONMENTS)
    missing = [method for method in ("reset", "step") if not hasattr(found, method)]
    if not callable(found) or missing:
        raise InputError(
            f"actors.environment = {name!r} must be a class with the methods reset and step; "
            f"missing: {', '.join(missing) or 'a constructor'}"
        )
    check_arguments(found, setting=_with(name, options), options=options)
    return partial(found, **options)


def _with(name: str, options: dict[str, Any]) -> str:
    said = f" with actors.environment_options = {options}" if options else ""
    return f"actors.environment = {name!r}{said}"
