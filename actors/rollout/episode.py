"""One rollout: the policy and its environment take turns, and rewards score the end.

    environment.reset ─▶ ids of the prompt ─▶ engine.generate ─▶ environment.step ─▶ rewards
                                                    ▲                   │ not done
                                                    └── injected ids ◀──┘

Messages of the environment are in the context and out of the loss: mask false, version −1,
log-probability 0. A rollout whose engine is interrupted ends as `aborted`, with the tokens that it
has. In the first turn any engine can continue it; later turns depend on the environment.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from actors.config import ActorsConfig
from actors.engines.protocol import Generation, RolloutEngine, SamplingParameters
from actors.environments.protocol import Environment, Message, Turn
from actors.errors import (
    EngineDied,
    EngineStale,
    EnvironmentFailed,
    PromptRefused,
    RolloutFailed,
    RolloutTimeout,
)
from actors.rewards import Rewards, shaping_parts
from actors.rewards.find_reward import is_finite
from actors.rollout.chat_rendering import Renderer
from actors.rollout.stops import Stops, load_stops
from actors.shipped import ENVIRONMENTS
from headway import clock
from headway.clean_text import without_known_secrets
from headway.errors import HeadwayError, InputError
from headway.user_code import call, describe_error, shown, where_raised
from queues.records import FinishReason, Lease, Purpose, Rollout, TurnReward

LONGEST_TOKEN = 200
"""Characters of a token at most, for an answer of an environment to be tokenised at all."""


@dataclass(slots=True)
class Transcript:
    """The tokens of a rollout so far; all lists have one length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    """Salt of the first request, and so of all: their cached state is this rollout's own past."""

    @classmethod
    def of(cls, saved: Rollout) -> "Transcript":
        """Return the transcript of an interrupted rollout."""
        return cls(
            token_ids=[*saved.token_ids],
            loss_mask=[*saved.loss_mask],
            behavior_logprobs=[*saved.behavior_logprobs],
            versions=[*saved.versions],
        )

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.loss_mask)

    def inject(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [False] * count
        self.behavior_logprobs += [0.0] * count
        self.versions += [-1] * count

    def sample(self, generation: Generation) -> None:
        """Append tokens that the policy sampled."""
        self.token_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.behavior_logprobs += generation.logprobs
        self.versions += generation.versions
        self.cache_salt = generation.cache_salt

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        for column in (self.token_ids, self.loss_mask, self.behavior_logprobs, self.versions):
            del column[length:]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Turns leases into rollouts; one runner serves all rollouts of an actor."""

    engine_id: str
    engine: RolloutEngine
    renderer: Renderer
    config: ActorsConfig
    """Sampling, limits and penalties; a lease may give another temperature."""
    new_environment: Callable[[], Environment]
    rewards: Rewards
    """Rewards of training rollouts."""
    heldout_rewards: Rewards
    """Rewards of evaluations."""
    max_model_len: int
    """Longest rollout in tokens."""
    stops: Stops = field(init=False)
    """Stops of the recipe."""

    def __post_init__(self) -> None:
        stops = load_stops(self.renderer, self.config.stop, include=self.config.include_stop)
        object.__setattr__(self, "stops", stops)

    async def run(self, lease: Lease, sample_index: int, saved: Rollout | None = None) -> Rollout:
        """Sample and score one rollout of a group.

        `saved` is the rollout so far, interrupted in its first turn. The result is `aborted` and
        without a reward where the engine was interrupted in the first turn.

        Raises:
            RolloutFailed: There is no result; the subclass gives the reason.
            EngineDied: The engine is gone, and with it every other rollout.
        """
        try:
            async with asyncio.timeout(self.config.rollout_timeout_seconds) as deadline:
                return await self._play(lease, sample_index, saved)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RolloutTimeout(
                f"rollout {sample_index} of prompt {lease.prompt.prompt_id!r} took longer than "
                f"{self.config.rollout_timeout_seconds:g} s"
            ) from error

    async def _play(self, lease: Lease, sample_index: int, saved: Rollout | None) -> Rollout:
        created_at = saved.created_at if saved else datetime.fromtimestamp(clock.now(), UTC)
        environment = await self._environment(lease)
        messages = await self._ask(lease, environment.reset, lease.prompt)
        opening = self._checked(lease, Turn(messages, None, done=False))
        transcript, prompt_length = self._opening(lease, opening, saved)
        environment_reward, turns, began, left_out = 0.0, 0, prompt_length, 0
        turn_rewards: list[TurnReward] = []
        while True:
            turns += 1
            request_id = f"{lease.group_id}/{lease.attempt}/{sample_index}/{turns}"
            generation = await self._generate(lease, request_id, transcript, first=turns == 1)
            transcript.sample(generation)
            finish_reason = generation.finish_reason
            if (length := self.stops.find(transcript.token_ids[began:])) is not None:
                transcript.cut(began + length)
                finish_reason = FinishReason.STOP
            if finish_reason is FinishReason.ABORTED:
                return self._unscored(transcript, sample_index, prompt_length, created_at)
            reply = self.stops.text(transcript.token_ids[began:])
            answer = await self._ask(lease, environment.step, Message("assistant", reply))
            turn = self._checked(lease, answer)
            if turn.reward is not None:
                environment_reward += float(turn.reward)
                turn_end = len(transcript.token_ids) - 1
                turn_rewards.append(TurnReward(turn_end, float(turn.reward)))
            if turn.done or finish_reason is FinishReason.LENGTH:
                break
            if _characters(turn) > LONGEST_TOKEN * self.max_model_len:
                finish_reason, left_out = FinishReason.LENGTH, self.max_model_len
                break
            last = transcript.token_ids[-1]
            reply_ids = self._render(lease, self.renderer.continuation, turn.messages, last)
            if turns == self.config.max_turns or self._space(transcript, len(reply_ids)) < 1:
                finish_reason = FinishReason.LENGTH
                left_out = len(reply_ids) if turns < self.config.max_turns else 0
                break
            transcript.inject(reply_ids)
            began = len(transcript.token_ids)
        train = lease.purpose is Purpose.TRAIN
        rewards = self.rewards if train else self.heldout_rewards
        score = await rewards.score(lease.prompt, reply, finish_reason)
        parts = score.parts
        if self.config.environment != "single_turn":
            parts = {"environment": environment_reward, **parts}
        shaping = {}
        if train:
            space, sampled = self.max_model_len - prompt_length, transcript.sampled
            injected = len(transcript.token_ids) - prompt_length - sampled + left_out
            shaping = shaping_parts(
                self.config, sampled, finish_reason, space=space, injected=injected
            )
        return replace(
            self._unscored(transcript, sample_index, prompt_length, created_at),
            reward=score.total + environment_reward + sum(shaping.values()),
            reward_parts={**parts, **shaping},
            finish_reason=finish_reason,
            turns=turns,
            turn_rewards=tuple(turn_rewards),
        )

    def _opening(
        self, lease: Lease, opening: Turn, saved: Rollout | None
    ) -> tuple[Transcript, int]:
        """Return the tokens that the policy continues, and the length of the prompt in them."""
        if saved is not None:
            return Transcript.of(saved), saved.prompt_length
        transcript = Transcript()
        transcript.inject(self._render(lease, self.renderer.prompt, opening.messages))
        length = len(transcript.token_ids)
        if not 1 <= length < self.max_model_len:
            raise PromptRefused(
                f"prompt {lease.prompt.prompt_id!r} has {length} tokens, must have from 1 to "
                f"{self.max_model_len - 1}, one less than actors.max_model_len"
            )
        return transcript, length

    def _render(self, lease: Lease, render: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """Return the ids of messages; PromptRefused names the prompt."""
        try:
            return render(*arguments)
        except InputError:
            raise
        except Exception as error:
            problem = str(error) if isinstance(error, PromptRefused) else describe_error(error)
            raise PromptRefused(f"prompt {lease.prompt.prompt_id!r}: {problem}") from error

    def _unscored(
        self, transcript: Transcript, sample_index: int, prompt_length: int, created_at: datetime
    ) -> Rollout:
        """Return the rollout so far as one that was interrupted in its first turn."""
        return Rollout(
            sample_index=sample_index,
            token_ids=transcript.token_ids,
            prompt_length=prompt_length,
            loss_mask=transcript.loss_mask,
            behavior_logprobs=transcript.behavior_logprobs,
            versions=transcript.versions,
            reward=0.0,
            reward_parts={},
            finish_reason=FinishReason.ABORTED,
            turns=1,
            environment=self.config.environment,
            engine_id=self.engine_id,
            created_at=created_at,
            finished_at=datetime.fromtimestamp(clock.now(), UTC),
        )

    async def _environment(self, lease: Lease) -> Environment:
        """Build an environment; one in user code may take long."""
        if self.config.environment in ENVIRONMENTS:
            return self.new_environment()
        environment: Environment = await self._ask(lease, self.new_environment)
        return environment

    def _checked(self, lease: Lease, turn: Any) -> Turn:
        """Return an answer of the environment, with the secrets of this process hidden in it.

        Raises:
            EnvironmentFailed: It is not a Turn.
        """
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
                f"environment {self.config.environment!r} answered {shown(turn)} on prompt "
                f"{lease.prompt.prompt_id!r}, must be a Turn of messages and a finite reward, or "
                "None for no reward"
            )
        messages = [
            Message(message.role, without_known_secrets(message.content))
            for message in turn.messages
        ]
        checked: Turn = replace(turn, messages=messages)
        return checked

    def _space(self, transcript: Transcript, reply_length: int = 0) -> int:
        """Return how many tokens may still be sampled after a reply of the environment."""
        return min(
            self.config.max_new_tokens - transcript.sampled,
            self.max_model_len - len(transcript.token_ids) - reply_length,
        )

    async def _generate(
        self, lease: Lease, request_id: str, transcript: Transcript, *, first: bool
    ) -> Generation:
        """Sample the next message of the policy; only the first one may end as interrupted."""
        config, temperature = self.config, lease.temperature
        sampling = SamplingParameters(
            temperature=config.temperature if temperature is None else temperature,
            max_new_tokens=self._space(transcript),
            top_p=config.top_p,
            top_k=config.top_k,
            stop=self.stops.strings,
            stop_ids=self.stops.ids,
        )
        try:
            generation = await self.engine.generate(
                request_id, transcript.token_ids, sampling, cache_salt=transcript.cache_salt
            )
        except (EngineDied, EngineStale):
            raise
        except HeadwayError as error:
            raise RolloutFailed(f"request {request_id}: {error}") from error
        ended = generation.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not ended and not (first and generation.finish_reason is FinishReason.ABORTED):
            raise RolloutFailed(
                f"request {request_id} ended as {generation.finish_reason} after "
                f"{len(generation.token_ids)} tokens"
            )
        return generation

    async def _ask(self, lease: Lease, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self.config.environment_timeout_seconds) as deadline:
                return await call(method, *arguments)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                problem = f"took longer than {self.config.environment_timeout_seconds:g} s"
                where = ""
            else:
                problem, where = describe_error(error), where_raised(error)
            raise EnvironmentFailed(
                f"environment {self.config.environment!r} {problem} on prompt "
                f"{lease.prompt.prompt_id!r}{where}"
            ) from error


def _characters(turn: Turn) -> int:
    return sum(str.__len__(message.content) + 1 for message in turn.messages)
