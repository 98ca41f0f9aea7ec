"""Calls the rewards of a recipe within their deadlines, and adds them up by their weights.

A reward that raises, takes too long or returns anything but finite numbers fails its rollout:
nothing is ever scored 0 because of its error. Verifiers that ship with Headway read completions in
a sandbox, where a completion that breaks them scores 0. Other rewards run in processes of their own
(`pool`), except those that only compare two texts, which cannot hang and cost less than sending.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from actors.errors import Excused, RewardFailed, RewardModelLost
from actors.outages import ask
from actors.rewards.code import read_tests
from actors.rewards.find_reward import (
    FINISH_REASON,
    Metadata,
    NoNumber,
    RewardFunction,
    find_reward,
    is_verifier,
    parts_of,
)
from actors.rewards.learned import LearnedReward, TextScorer
from actors.rewards.pool import RewardPool
from actors.sandbox.sandbox import check_code_execution, check_compute_sandbox
from actors.shipped import REWARDS
from headway.errors import InputError
from headway.options import parse_options
from headway.user_code import describe_error, is_coroutine, where_raised
from queues.records import FinishReason, Prompt

Arguments = tuple[str, str, str | None, Metadata]
Reward = Callable[[Arguments], Awaitable[dict[str, float]]]
"""Returns the parts of a score, or raises as `call_here`."""


class Score(NamedTuple):
    """The score of a completion."""

    total: float
    """The sum of `parts`, each times the weight of its reward."""
    parts: dict[str, float]
    """Without weights; see `parts_of`."""


async def call_here(
    name: str,
    function: RewardFunction,
    arguments: Arguments,
    *,
    timeout: float,
    late: type[RewardFailed | RewardModelLost] = RewardFailed,
) -> dict[str, float]:
    """Return the parts of a coroutine function that never blocks; `late` is raised past `timeout`.

    Raises RewardFailed, whose message continues a sentence that begins with the reward's name, and
    RewardModelLost where reward models did not answer, by no fault of the completion.
    """
    try:
        async with asyncio.timeout(timeout) as deadline:
            return parts_of(name, await function(*arguments))
    except RewardModelLost as error:
        raise RewardModelLost(f"has no score: {error}", error.retry_after) from error
    except NoNumber as error:
        raise RewardFailed(str(error)) from None
    except RewardFailed:
        raise
    except Exception as error:
        if deadline.expired():
            raise late(f"took longer than {timeout:g} s") from None
        raise RewardFailed(describe_error(error) + where_raised(error)) from error


class Rewards:
    """Several rewards as one: their sum, each times its weight, which is 1 if none is given."""

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        self._rewards, self._weights = rewards, weights

    def only(self, names: Iterable[str]) -> "Rewards":
        """Return the rewards with these names; they share budgets and processes with the rest."""
        return Rewards({name: self._rewards[name] for name in names}, self._weights)

    async def score(
        self, prompt: Prompt, completion: str, finish_reason: FinishReason = FinishReason.STOP
    ) -> Score:
        """Score one completion with every reward; errors name the reward and the prompt.

        Raises RewardFailed if one gave no finite number, and Excused by no fault of the completion,
        as ServiceAway outside of a rollout, which would wait (`ask`).
        """
        reason = str(finish_reason)
        metadata = {"finish_reason": reason, **prompt.metadata, FINISH_REASON: reason}
        arguments = (prompt.text, completion, prompt.answer, metadata)
        total = 0.0
        parts: dict[str, float] = {}
        for name, reward in self._rewards.items():
            try:
                own_parts = await ask(f"reward {name!r}", partial(reward, arguments), RewardFailed)
            except (RewardFailed, Excused) as error:
                subject = f"reward {name!r} of prompt {prompt.prompt_id!r}"
                raise type(error)(f"{subject} {error}") from error.__cause__
            total += self._weights.get(name, 1.0) * sum(own_parts.values())
            parts |= own_parts
        return Score(total, parts)


def load_rewards(
    names: Sequence[str],
    *,
    timeout: float = 30.0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    weights: Mapping[str, float] | None = None,
    reward_model_client: TextScorer | None = None,
    pool: RewardPool | None = None,
    code_execution: Literal["off", "sandbox"] = "off",
) -> Rewards:
    """Load rewards by name.

    Raises InputError for an unknown reward or option, or one that may not run or has no sandbox
    here.

    Args:
        names: Names of `REWARDS`, or "module:function".
        timeout: Deadline of each reward in seconds.
        options: Keyword-only arguments of rewards, by name.
        weights: Factors by name; 1 for the others.
        reward_model_client: None fails every rollout with the reward `reward_model`.
        pool: None makes a pool.
        code_execution: As `actors.code_execution`.
    """
    if verifiers := [name for name in names if is_verifier(name)]:
        check_compute_sandbox(f"actors.reward = {verifiers[0]!r}")
    if "code" in names:
        check_code_execution('actors.reward = "code"', code_execution)
    options, pool = options or {}, pool or RewardPool()

    def load(name: str) -> Reward:
        if name == "reward_model":
            learned = LearnedReward(reward_model_client)
            return partial(call_here, name, learned, timeout=timeout, late=RewardModelLost)
        chosen = options.get(name, {})
        if name == "llm_judge":
            from actors.rewards.llm_judge import LlmJudge

            judge = parse_options(LlmJudge, "actors.reward_options.llm_judge", chosen)
            return partial(call_here, name, judge, timeout=timeout, late=RewardModelLost)
        function, traits = find_reward(name, chosen), REWARDS.load(name).traits
        if traits.inline:
            return partial(call_here, name, function, timeout=timeout)
        reward = (name, dict(chosen))
        if traits.verifier:
            return partial(pool.verify, reward, timeout=timeout)
        return partial(pool.call, reward, timeout=timeout, coroutine=is_coroutine(function))

    return Rewards({name: load(name) for name in dict.fromkeys(names)}, weights or {})


def check_scorable(names: Sequence[str], prompts: Iterable[Prompt]) -> None:
    """Raise InputError if prompts lack what the shipped rewards need: an answer, entry or tests."""
    compare = [name for name in REWARDS if name in names and REWARDS[name].traits.needs_answer]
    for prompt in prompts:
        if compare and not (prompt.answer or "").strip():
            raise InputError(
                f"actors.reward = {compare[0]!r} compares with the answer of a prompt, and prompt "
                f"{prompt.prompt_id!r} has {'none' if prompt.answer is None else 'an empty one'}; "
                "give answers, or a reward that needs none"
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
                raise InputError(
                    f"actors.reward = 'code': prompt {prompt.prompt_id!r}: {error}"
                ) from None
