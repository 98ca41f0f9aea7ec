"""The environment of one rollout: asked within a deadline, its answers checked."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from actors.config import ActorsConfig
from actors.environments.protocol import Environment, Message, Turn
from actors.errors import EnvironmentFailed
from actors.rewards.find_reward import is_finite
from actors.shipped import ENVIRONMENTS
from headway.clean_text import without_known_secrets
from headway.user_code import call, describe_error, shown, where_raised
from queues.records import Prompt


class Conversation:
    """A conversation about a prompt; its errors, EnvironmentFailed, name the prompt."""

    def __init__(
        self, new_environment: Callable[[], Environment], config: ActorsConfig, prompt: Prompt
    ) -> None:
        self._new_environment, self._prompt = new_environment, prompt
        self._name, self._seconds = config.environment, config.environment_timeout_seconds

    async def begin(self) -> Sequence[Message]:
        """Build the environment, and return the messages of the prompt."""
        shipped = self._name in ENVIRONMENTS
        self._environment: Environment = (
            self._new_environment() if shipped else await self._ask(self._new_environment)
        )
        messages = await self._ask(self._environment.reset, self._prompt)
        return self._checked(Turn(messages, None, done=False)).messages

    async def step(self, reply: str) -> Turn:
        """Return the answer to a message of the policy."""
        answer = await self._ask(self._environment.step, Message("assistant", reply))
        return self._checked(answer)

    async def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return await call(method, *arguments)
        except Exception as error:
            problem, where = describe_error(error), where_raised(error)
            if isinstance(error, TimeoutError) and deadline.expired():
                problem, where = f"took longer than {self._seconds:g} s", ""
            raise EnvironmentFailed(
                f"environment {self._name!r} {problem} on prompt {self._prompt.prompt_id!r}{where}"
            ) from error

    def _checked(self, turn: Any) -> Turn:
        """Return an answer of the environment, with the secrets of this process hidden in it."""
        valid = (
            isinstance(turn, Turn)
            and (turn.reward is None or is_finite(turn.reward))
            and isinstance(turn.messages, Sequence)
            and all(
                isinstance(message, Message)
                and isinstance(message.content, str)
                and isinstance(message.role, str)
                for message in turn.messages
            )
        )
        if not valid:
            raise EnvironmentFailed(
                f"environment {self._name!r} answered {shown(turn)} on prompt "
                f"{self._prompt.prompt_id!r}, must be a Turn of messages and a finite reward, or "
                "None for no reward"
            )
        messages = [
            Message(message.role, without_known_secrets(message.content))
            for message in turn.messages
        ]
        checked: Turn = replace(turn, messages=messages)
        return checked
