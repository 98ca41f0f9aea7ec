"""Calls the rewards of a recipe within their deadlines, and adds them up by their weights.

A reward that raises, takes too long or returns anything but finite numbers has failed, and with it
the rollout: nothing is ever scored 0 because something went wrong. Rewards run in processes of
their own (`pool`), except those that take no longer than comparing two texts: a hop to another
process would cost them many times their own work, and they cannot hang.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from actors.errors import InputError, RewardFailed, RewardModelLost
from actors.rewards.code import read_tests
from actors.rewards.learned import Judge, LearnedReward
from actors.rewards.parts import NoNumber, parts_of
from actors.rewards.pool import RewardPool
from actors.rewards.registry import SHIPPED, find_reward, is_coroutine, load_llm_judge
from actors.sandbox import check_sandbox
from queues.records import FinishReason, Prompt

Arguments = tuple[str, str, str | None, Mapping[str, Any]]


class Score(NamedTuple):
    """What a rollout is worth."""

    total: float
    """The sum of `parts`, each times the weight of its reward."""
    parts: dict[str, float]
    """By the reward's name, or "name/key" for each key of a reward that returns several; as the
    reward gave them, without weights."""


class Reward(Protocol):
    """One reward, wherever it runs."""

    async def parts(self, arguments: Arguments) -> dict[str, float]:
        """What it says of one completion.

        Raises:
            RewardFailed: It gave no finite numbers; says why, in words that follow its name.
            RewardModelLost: The reward models gave none, by no fault of the completion.
        """
        ...


class Inline:
    """A coroutine function that is called in this process.

    Args:
        name: Of its part.
        function: Nothing that could block.
        timeout: Deadline in seconds.
        late: The error of one that takes longer.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        timeout: float,
        late: type[RewardFailed | RewardModelLost] = RewardFailed,
    ) -> None:
        self._name, self._function, self._timeout, self._late = name, function, timeout, late

    async def parts(self, arguments: Arguments) -> dict[str, float]:
        """See `Reward.parts`."""
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return parts_of(self._name, await self._function(*arguments))
        except RewardModelLost as error:
            raise RewardModelLost(f"has no score: {error}") from error
        except NoNumber as error:
            raise RewardFailed(str(error)) from None
        except RewardFailed:
            raise
        except Exception as error:
            if deadline.expired():
                raise self._late(f"took longer than {self._timeout:g} s") from None
            raise RewardFailed(f"raised {error!r}") from error


class Isolated:
    """A reward that is called in a process of its own.

    Args:
        name: As in the recipe.
        options: Of the reward.
        pool: Whose processes.
        timeout: Deadline in seconds.
        coroutine: Whether many calls may wait side by side.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        pool: RewardPool,
        timeout: float,
        *,
        coroutine: bool,
    ) -> None:
        self._reward = (name, dict(options))
        self._pool, self._timeout, self._coroutine = pool, timeout, coroutine

    async def parts(self, arguments: Arguments) -> dict[str, float]:
        """See `Reward.parts`."""
        return await self._pool.call(
            self._reward, arguments, timeout=self._timeout, coroutine=self._coroutine
        )


class Rewards:
    """Several rewards as one.

    Args:
        rewards: By name.
        weights: By name; 1 where there is none.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        self._rewards = dict(rewards)
        self._weights = dict(weights)

    def only(self, names: Iterable[str]) -> "Rewards":
        """Those with these names; a budget or a process they share with the rest."""
        return Rewards({name: self._rewards[name] for name in names}, self._weights)

    async def score(
        self, prompt: Prompt, completion: str, finish_reason: FinishReason = FinishReason.STOP
    ) -> Score:
        """Scores one completion with every reward.

        Raises:
            RewardFailed: One of them gave no finite number; names it and the prompt.
            RewardModelLost: The reward models gave none in time, by no fault of the completion.
        """
        metadata = {**prompt.metadata, "finish_reason": str(finish_reason)}
        arguments = (prompt.text, completion, prompt.answer, metadata)
        total = 0.0
        parts: dict[str, float] = {}
        for name, reward in self._rewards.items():
            try:
                found = await reward.parts(arguments)
            except (RewardFailed, RewardModelLost) as error:
                place = f"reward {name!r} of prompt {prompt.prompt_id!r}"
                raise type(error)(f"{place} {error}") from error.__cause__
            total += self._weights.get(name, 1.0) * sum(found.values())
            parts |= found
        return Score(total, parts)


def load_rewards(
    names: Sequence[str],
    *,
    timeout: float = 30.0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    weights: Mapping[str, float] | None = None,
    judge: Judge | None = None,
    pool: RewardPool | None = None,
    code_execution: Literal["off", "sandbox"] = "off",
) -> Rewards:
    """The rewards with these names.

    Args:
        names: Of `registry.SHIPPED`, `reward_model`, or "module:function".
        timeout: Deadline of each one in seconds.
        options: Keyword-only arguments of rewards, by name.
        weights: Factors of rewards in the total, by name; 1 where there is none.
        judge: What `reward_model` asks; without one it fails every rollout.
        pool: Where rewards run that need processes; without one they get their own.
        code_execution: Whether the reward `code` may run what the policy writes.

    Raises:
        InputError: No such reward, or options that it does not have, or `code` is not allowed or
            has no sandbox on this machine.
    """
    if "code" in names:
        _check_code_execution(code_execution)
    options, pool = options or {}, pool or RewardPool()

    def load(name: str) -> Reward:
        if name == "reward_model":
            return Inline(name, LearnedReward(judge), timeout, RewardModelLost)
        chosen = options.get(name, {})
        if name == "llm_judge":
            return Inline(name, load_llm_judge(chosen), timeout, RewardModelLost)
        function = find_reward(name, chosen)
        if name in SHIPPED and SHIPPED[name].inline:
            return Inline(name, function, timeout)
        return Isolated(name, chosen, pool, timeout, coroutine=is_coroutine(function))

    return Rewards({name: load(name) for name in dict.fromkeys(names)}, weights or {})


def _check_code_execution(code_execution: Literal["off", "sandbox"]) -> None:
    if code_execution == "off":
        raise InputError(
            'actors.reward = "code" runs programs that the model writes, which is off; set '
            'actors.code_execution = "sandbox" to allow it'
        )
    check_sandbox()


def check_scorable(names: Sequence[str], prompts: Iterable[Prompt]) -> None:
    """Compares what the rewards that ship with Headway need with what prompts have.

    Raises:
        InputError: A prompt without an answer, without the entry of its reasoning-gym task, or
            without tests.
    """
    compare = [name for name in names if name in SHIPPED and SHIPPED[name].answer]
    for prompt in prompts:
        if compare and prompt.answer is None:
            raise InputError(
                f"actors.reward = {compare[0]!r} compares with the answer of a prompt, and prompt "
                f"{prompt.prompt_id!r} has none; give answers, or a reward that needs none"
            )
        if "reasoning_gym" in names and "entry" not in prompt.metadata:
            raise InputError(
                "actors.reward = 'reasoning_gym' scores problems of a source reasoning_gym:TASK, "
                f"and prompt {prompt.prompt_id!r} is not one; give another reward"
            )
        if "code" in names:
            try:
                read_tests(prompt.metadata.get("tests"))
            except ValueError as error:
                place = f"actors.reward = 'code': prompt {prompt.prompt_id!r}"
                raise InputError(f"{place}: {error}") from None
