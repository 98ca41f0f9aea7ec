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
    Parts,
    RewardFunction,
    StepParts,
    find_reward,
    is_of_group,
    is_verifier,
    score_of,
)
from actors.rewards.learned import LearnedReward, TextScorer
from actors.rewards.pool import RewardPool, Scored
from actors.sandbox.sandbox import check_code_execution, check_compute_sandbox
from actors.shipped import REWARDS
from headway.errors import InputError
from headway.options import parse_options
from headway.user_code import describe_error, is_coroutine, where_raised
from queues.records import FinishReason, Prompt

JUDGES = ("llm_judge", "pairwise_judge")
Arguments = tuple[str, str | Sequence[str], str | None, Metadata]
Reward = Callable[[Arguments], Awaitable[Scored]]
"""Returns the parts of a score, or raises as `call_here`."""


class Score(NamedTuple):
    """The score of a completion."""

    total: float
    """The sum of `parts`, each times its weight and that of its reward."""
    parts: Parts
    """Without weights; see `parts_of`."""
    steps: tuple[tuple[int, float], ...] = ()
    """Scores of steps by which `total` is left to grow: the characters of the completion up to the
    end of each, and its score times its weights."""


async def call_here(
    name: str,
    function: RewardFunction,
    arguments: Arguments,
    *,
    timeout: float,
    late: type[RewardFailed | RewardModelLost] = RewardFailed,
) -> Scored:
    """Return the parts of a coroutine function that never blocks; `late` is raised past `timeout`.

    Raises RewardFailed, whose message continues a sentence that begins with the reward's name, and
    RewardModelLost where reward models did not answer, by no fault of the completion.
    """
    try:
        async with asyncio.timeout(timeout) as deadline:
            return score_of(name, arguments[1], await function(*arguments))
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
    """Several rewards as one: their sum, each times its weight, which is 1 if none is given.

    A part of a reward may have a weight of its own, which multiplies.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        of_groups: frozenset[str] = frozenset(),
    ) -> None:
        self._rewards, self._weights = rewards, weights
        self.of_groups = of_groups.intersection(rewards)
        """Names of those that score groups (`score_group`)."""

    def only(self, names: Iterable[str]) -> "Rewards":
        """Return the rewards with these names; they share budgets and processes with the rest."""
        chosen = {name: self._rewards[name] for name in names}
        return Rewards(chosen, self._weights, self.of_groups)

    async def score(
        self,
        prompt: Prompt,
        completion: str,
        finish_reason: FinishReason = FinishReason.STOP,
        *,
        by_step: bool = False,
    ) -> Score:
        """Score one completion with every reward of single ones; errors name reward and prompt.

        With `by_step`, the scores of process reward models are `Score.steps`.

        Raises RewardFailed if one gave no finite number, and Excused by no fault of the completion,
        as ServiceAway outside of a rollout, which would wait (`ask`).
        """
        one = prompt, [completion], [finish_reason]
        [score] = await self._score(*one, of_group=False, by_step=by_step)
        return score

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Score]:
        """Score the completions of a group with every reward of groups; errors as of `score`."""
        return await self._score(prompt, completions, finish_reasons, of_group=True)

    async def _score(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        finish_reasons: Sequence[FinishReason],
        *,
        of_group: bool,
        by_step: bool = False,
    ) -> list[Score]:
        reasons: Any = [*map(str, finish_reasons)] if of_group else str(finish_reasons[0])
        metadata = {"finish_reason": reasons, **prompt.metadata, FINISH_REASON: reasons}
        texts = completions if of_group else completions[0]
        arguments = (prompt.text, texts, prompt.answer, metadata)
        scores = [Score(0.0, {})] * len(completions)
        for name, reward in self._rewards.items():
            if (name in self.of_groups) is not of_group:
                continue
            try:
                scored = await ask(f"reward {name!r}", partial(reward, arguments), RewardFailed)
            except (RewardFailed, Excused) as error:
                subject = f"reward {name!r} of prompt {prompt.prompt_id!r}"
                raise type(error)(f"{subject} {error}") from error.__cause__
            of_each = [scored] if isinstance(scored, dict) else scored
            for index, parts in enumerate(of_each):
                total, earlier, steps = scores[index]
                if by_step and isinstance(parts, StepParts):
                    weighted = (
                        (s.end, self._weighted(name, {s.part: s.score})) for s in parts.steps
                    )
                    steps = (*steps, *weighted)
                else:
                    total += self._weighted(name, parts)
                scores[index] = Score(total, earlier | parts, steps)
        return scores

    def _weighted(self, name: str, parts: Parts) -> float:
        """Return the sum of a reward's parts, each times its own weight, times the reward's."""
        own = {part: self._weights.get(part, 1.0) for part in parts if part != name}
        weight = self._weights.get(name, 1.0)
        return weight * sum(own.get(part, 1.0) * value for part, value in parts.items())


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
        weights: Factors by the name of a reward or of its part; 1 for the others.
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
        if name in JUDGES:
            kind: Any = REWARDS[name].function
            judge = parse_options(kind, f"actors.reward_options.{name}", chosen)
            return partial(call_here, name, judge, timeout=timeout, late=RewardModelLost)
        function, traits = find_reward(name, chosen), REWARDS.load(name).traits
        if traits.inline:
            return partial(call_here, name, function, timeout=timeout)
        reward = (name, dict(chosen))
        if traits.verifier:
            return partial(pool.verify, reward, timeout=timeout)
        return partial(pool.call, reward, timeout=timeout, coroutine=is_coroutine(function))

    loaded = {name: load(name) for name in dict.fromkeys(names)}
    return Rewards(loaded, weights or {}, frozenset(filter(is_of_group, loaded)))


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
