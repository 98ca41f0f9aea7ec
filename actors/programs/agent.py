"""The interface of an agent, and what it may give as its result."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from actors.errors import EnvironmentFailed
from actors.foreign_text import unencodable
from actors.gateway.requests import MODEL
from actors.rewards.find_reward import NoNumber, parts_of
from headway.clean_text import without_known_secrets
from headway.user_code import call, describe_error, shown, where_raised


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Everything that an agent is given for one rollout."""

    prompt_id: str
    prompt: str
    messages: Sequence[Mapping[str, str]]
    """The prompt as chat messages, with `role` and `content`."""
    answer: str | None
    metadata: Mapping[str, Any]
    base_url: str
    """Address of OpenAI's API, which ends in /v1; that of Anthropic's is the same without it."""
    api_key: str = field(repr=False)
    """Key of this rollout, for both."""
    rollout_id: str = ""
    """Name of the rollout, the same in all of its attempts."""
    turns: int = 0
    """Turns of earlier attempts, which the session knows; with 0 the rollout begins anew."""
    folder: str = ""
    """Working folder of this rollout alone, empty; a program is started in it."""
    model: str = MODEL

    def described(self) -> dict[str, Any]:
        """Return the fields that an agent elsewhere is told of its task, as JSON."""
        names = "rollout_id", "prompt_id", "prompt", "messages", "answer", "metadata"
        return {name: getattr(self, name) for name in names}


class AgentResult(NamedTuple):
    """The result of an agent, as far as it has one."""

    reward: Mapping[str, float] | None = None
    """Parts of its reward, by their full names."""
    completion: str | None = None
    """Text that the recipe's rewards read in place of the policy's last message."""


class AgentGone(EnvironmentFailed):
    """An agent was lost, such as by a kill from outside; it is played again, from the turns so far.

    Lost several times in one attempt, it has failed.
    """


class Agent(Protocol):
    """An agent; it serves all rollouts of an actor at once."""

    async def play(self, task: AgentTask) -> AgentResult:
        """Play one task; raises EnvironmentFailed, and AgentGone where it is not to blame.

        Cancelled, it ends everything that it has started for the task.
        """

    async def close(self) -> None:
        """End what it has started."""


def result_of(value: Any) -> AgentResult:
    """Read what an agent gave: a number, numbers by name, a text, or None.

    Raises NoNumber, whose message continues a sentence that begins with the agent's name.
    """
    if value is None:
        return AgentResult()
    if isinstance(value, str):
        if unencodable(value):
            raise NoNumber(f"returned {shown(value)}, which UTF-8 cannot encode")
        return AgentResult(completion=without_known_secrets(value))
    return AgentResult(reward=parts_of("environment", value))


def read_result(text: str, longest: int) -> AgentResult:
    """Read the file that a program wrote: JSON of an object with `reward`, or any other text."""
    if len(text) > longest:
        raise NoNumber(f"wrote a result of more than {longest} bytes")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return result_of(text)
    if not isinstance(value, dict) or "reward" not in value:
        return result_of(text)
    if isinstance(value["reward"], str | None):
        raise NoNumber(f"returned {shown(value['reward'])} for 'reward', must be a finite number")
    return result_of(value["reward"])


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent that is a function or coroutine of the user's, called with an `AgentTask`."""

    name: str
    function: Callable[[AgentTask], Any]

    async def play(self, task: AgentTask) -> AgentResult:
        """See `Agent`; a plain function runs in a thread, and cannot be ended from outside."""
        with TemporaryDirectory(prefix="headway-agent-", ignore_cleanup_errors=True) as folder:
            try:
                return result_of(await call(self.function, replace(task, folder=folder)))
            except NoNumber as error:
                raise EnvironmentFailed(failure(self.name, task, str(error))) from None
            except Exception as error:
                problem = describe_error(error) + where_raised(error)
                raise EnvironmentFailed(failure(self.name, task, problem)) from error

    async def close(self) -> None:
        """There is nothing to end."""


def failure(name: str, task: AgentTask, problem: str) -> str:
    """Describe how an agent failed, without the key of its session."""
    text = f"agent {name!r} {problem}, on prompt {task.prompt_id!r}"
    return text.replace(task.api_key, "[key]")
