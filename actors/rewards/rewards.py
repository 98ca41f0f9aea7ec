"""Finds rewards, calls them within a deadline, and adds them up.

A reward that raises, takes too long or returns anything but finite numbers has failed, and with it
the rollout: nothing is ever scored 0 because something went wrong. Leaves out isolation: rewards
run in this process, and one that neither returns nor can be cancelled goes on in its thread.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from actors.config import REWARDS
from actors.dotted_path import check_arguments, load_dotted
from actors.errors import InputError, RewardFailed, RewardModelLost
from actors.finite import is_finite
from actors.rewards.learned import Judge, LearnedReward
from actors.user_code import call
from queues.records import FinishReason, Prompt

RewardFunction = Callable[[str, str, str | None, Mapping[str, Any]], Any]
"""score(prompt, completion, answer, metadata) -> float | dict[str, float], or a coroutine of it.

`metadata` is the prompt's, with `finish_reason` added: "stop" where the policy ended the completion
itself, "length" where it was cut off.
"""


class Score(NamedTuple):
    """What a rollout is worth."""

    total: float
    """The sum of `parts`."""
    parts: dict[str, float]
    """By the reward's name, or "name/key" for each key of a reward that returns several."""


class Rewards:
    """Several rewards as one.

    Args:
        functions: Rewards by name.
        timeout: Deadline of each one in seconds.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], *, timeout: float) -> None:
        self._functions = dict(functions)
        self._timeout = timeout

    async def score(
        self, prompt: Prompt, completion: str, finish_reason: FinishReason = FinishReason.STOP
    ) -> Score:
        """Scores one completion with every reward.

        Raises:
            RewardFailed: One of them gave no finite number; names it and the prompt.
            RewardModelLost: The reward models gave none in time, by no fault of the completion.
        """
        metadata = {**prompt.metadata, "finish_reason": str(finish_reason)}
        parts: dict[str, float] = {}
        for name, function in self._functions.items():
            place = f"reward {name!r} of prompt {prompt.prompt_id!r}"
            try:
                async with asyncio.timeout(self._timeout) as deadline:
                    found = await call(function, prompt.text, completion, prompt.answer, metadata)
            except RewardModelLost as error:
                raise RewardModelLost(f"{place}: {error}") from error
            except Exception as error:
                if deadline.expired():
                    kind = RewardModelLost if isinstance(function, LearnedReward) else RewardFailed
                    raise kind(f"{place} took longer than {self._timeout:g} s") from None
                raise RewardFailed(f"{place} raised {error!r}") from error
            parts |= _parts(name, found, place)
        return Score(sum(parts.values()), parts)


def load_rewards(
    names: Sequence[str], *, timeout: float = 30.0, judge: Judge | None = None
) -> Rewards:
    """The rewards with these names.

    Args:
        names: `exact_match`, `last_answer`, `math_verify`, `reasoning_gym`, `reward_model`, or
            "module:function".
        timeout: Deadline of each one in seconds.
        judge: What `reward_model` asks; without one it fails every rollout.

    Raises:
        InputError: No such reward.
    """
    return Rewards({name: _function(name, judge) for name in names}, timeout=timeout)


def check_scorable(names: Sequence[str], prompts: Iterable[Prompt]) -> None:
    """Compares what the rewards that ship with Headway need with what prompts have.

    Raises:
        InputError: A prompt without an answer, or without the entry of its reasoning-gym task.
    """
    compare = [name for name in names if name in ("exact_match", "last_answer", "math_verify")]
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


def _function(name: str, judge: Judge | None) -> RewardFunction:
    if name in ("exact_match", "last_answer"):
        from actors.rewards import answers

        found = getattr(answers, name)
    elif name == "math_verify":
        from actors.rewards.math_verify import math_verify as found
    elif name == "reasoning_gym":
        from actors.rewards.reasoning_gym import reasoning_gym as found
    elif name == "reward_model":
        found = LearnedReward(judge)
    else:
        found = load_dotted(name, setting="actors.reward", known=REWARDS)
    if not callable(found):
        raise InputError(f"actors.reward = {name!r} is a {type(found).__name__}, not a function")
    setting = f"actors.reward = {name!r}"
    check_arguments(found, "prompt", "completion", "answer", "metadata", setting=setting)
    function: RewardFunction = found
    return function


def _parts(name: str, found: Any, place: str) -> dict[str, float]:
    """What a reward returned, as named finite numbers."""
    named = {name: found}
    if isinstance(found, Mapping) and found:
        named = {f"{name}/{key}": value for key, value in found.items()}
    for key, value in named.items():
        if not is_finite(value):
            raise RewardFailed(f"{place} returned {value!r} for {key!r}, must be a finite number")
    return {key: float(value) for key, value in named.items()}
