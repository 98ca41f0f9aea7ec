"""The environment of one rollout: asked within a deadline, its answers checked."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors.config import ActorsConfig
from actors.environments.protocol import Environment, Message, Recall, Turn
from actors.errors import AnswerLate, EnvironmentFailed, ServiceAway
from actors.outages import ask, outage, timeout, waits_on_network
from actors.rewards.find_reward import is_finite
from actors.rollout.agent_statistics import AgentStatistics
from actors.shipped import ENVIRONMENTS
from headway.clean_text import without_known_secrets
from headway.user_code import call, describe_error, shown, where_raised
from queues.records import Prompt


class Conversation:
    """A conversation about a prompt; its errors, EnvironmentFailed, name the prompt.

    A call whose service is away is repeated with the same arguments (`actors.outages`).
    """

    def __init__(
        self,
        new_environment: Callable[[], Environment],
        config: ActorsConfig,
        prompt: Prompt,
        statistics: AgentStatistics,
    ) -> None:
        self._new_environment, self._prompt = new_environment, prompt
        self._statistics = statistics
        self.answering_seconds = 0.0
        """Time of answers to the policy, without pauses for a service."""
        self._name, self._seconds = config.environment, config.environment_timeout_seconds

    async def begin(self) -> Sequence[Message]:
        """Build the environment, and return the messages of the prompt."""
        shipped = self._name in ENVIRONMENTS
        self._environment: Environment = (
            self._new_environment() if shipped else await self._ask("begin", self._new_environment)
        )
        messages = await self._ask("reset", self._environment.reset, self._prompt)
        return self._checked(Turn(messages, None, done=False)).messages

    async def step(self, reply: str, recall: Recall) -> Turn:
        """Return the answer to a message of the policy; raise AnswerLate past its deadline.

        The environment `tools` makes its calls by `recall`.
        """
        recalled = (recall,) if self._name == "tools" else ()
        message = Message("assistant", reply)
        answer = await self._ask("step", self._environment.step, message, *recalled)
        return self._checked(answer)

    async def _ask(self, part: str, method: Callable[..., Any], *arguments: Any) -> Any:
        call_once = partial(self._once, part == "step", method, *arguments)
        return await ask(f"{part} of environment {self._name!r}", call_once, EnvironmentFailed)

    async def _once(self, is_answer: bool, method: Callable[..., Any], *arguments: Any) -> Any:
        began = asyncio.get_running_loop().time()
        try:
            async with timeout(self._seconds) as deadline:
                return await call(method, *arguments)
        except Exception as error:
            problem, where, away = describe_error(error), where_raised(error), outage(error)
            late = isinstance(error, TimeoutError) and deadline.expired()
            if late:
                problem, where = f"took longer than {self._seconds:g} s", ""
            text = f"environment {self._name!r} {problem} on prompt {self._prompt.prompt_id!r}"
            if away or (late and waits_on_network()):
                retry_after = away.retry_after if away else 0.0
                raise ServiceAway(text + where, retry_after=retry_after) from error
            raise (AnswerLate if late and is_answer else EnvironmentFailed)(text + where) from error
        finally:
            if is_answer:  # less the pauses, by which the deadline was moved
                paused = (deadline.when() or 0.0) - began - self._seconds
                seconds = asyncio.get_running_loop().time() - began - paused
                self.answering_seconds += seconds
                self._statistics.seconds["environment"] += seconds

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
