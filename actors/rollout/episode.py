"""One rollout: the policy and its environment take turns, and rewards score the end.

    environment.reset ─▶ ids of the prompt ─▶ engine.generate ─▶ environment.step ─▶ rewards
                                                    ▲                   │ not done
                                                    └── injected ids ◀──┘

A rollout whose engine is interrupted ends as `aborted`, with the tokens that it has. In the first
turn any engine can continue it; later turns depend on the environment.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from actors.config import ActorsConfig
from actors.engines.protocol import Generation, RolloutEngine, SamplingParameters
from actors.environments.protocol import Environment, Message
from actors.environments.single_turn import opening
from actors.errors import (
    AnswerLate,
    EngineDied,
    EngineStale,
    EnvironmentFailed,
    PromptRefused,
    RolloutFailed,
    RolloutTimeout,
)
from actors.outages import Outages, outage, timeout, waits_on_network
from actors.rewards.gold import GoldReward
from actors.rewards.rewards import Rewards
from actors.rewards.shaping import shaping_parts
from actors.rollout.chat_rendering import Renderer
from actors.rollout.conversation import Conversation
from actors.rollout.stops import Stops, load_stops
from actors.rollout.transcript import Transcript
from headway import clock
from headway.errors import HeadwayError, InputError
from headway.user_code import describe_error
from queues.records import FinishReason, Lease, Prompt, Purpose, Rollout, TurnReward

LONGEST_TOKEN = 200
"""Characters of a token at most, for an answer of an environment to be tokenised at all."""


@dataclass(slots=True, kw_only=True)
class EpisodeRunner:
    """Turns leases into rollouts; one runner serves all rollouts of an actor."""

    engine_id: str
    engine: RolloutEngine
    renderer: Renderer
    config: ActorsConfig
    """Sampling, limits and penalties; a lease may give another temperature."""
    new_environment: Callable[[], Environment]
    rewards: Rewards
    heldout_rewards: Rewards
    max_model_len: int
    """Longest rollout in tokens."""
    gold: GoldReward | None = None
    stops: Stops = field(init=False)
    outages: Outages = field(init=False)

    def __post_init__(self) -> None:
        self.outages = Outages(self.config.outage_seconds)
        self.stops = load_stops(self.renderer, self.config.stop, include=self.config.include_stop)

    async def run(self, lease: Lease, sample_index: int, saved: Rollout | None = None) -> Rollout:
        """Sample and score one rollout of a group; `saved` was interrupted in its first turn.

        The result is `aborted` and without a reward where the engine was interrupted in the first
        turn. Where answers to the policy took too long, it has the reward `actors.on_timeout`, if
        that is a number. Raises RolloutFailed, whose subclass gives the reason, EngineDied, and
        ServiceLost.
        """
        seconds, score = self.config.rollout_timeout_seconds, self.config.on_timeout
        try:
            async with timeout(seconds, self.outages) as deadline:
                episode = Episode(self, lease, sample_index, saved)
                return await episode.play()
        except AnswerLate as late:
            if score == "fail":
                raise EnvironmentFailed(str(late)) from late
            return episode.timed_out(score)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            by_policy = 2 * episode.conversation.answering_seconds > seconds
            if score != "fail" and by_policy and not (outage(error) or waits_on_network()):
                return episode.timed_out(score)
            raise RolloutTimeout(
                f"rollout {sample_index} of prompt {lease.prompt.prompt_id!r} took longer than "
                f"{seconds:g} s"
            ) from error

    async def score_group(self, lease: Lease, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Add the rewards of groups to the finished rollouts of one, its baseline included.

        Those that `actors.on_timeout` has scored keep that, and are not compared. Raises
        RolloutFailed and ServiceLost.
        """
        rewards, seconds = self.rewards, self.config.rollout_timeout_seconds
        compared = [r for r in rollouts if r.finish_reason is not FinishReason.TIMEOUT]
        if not (rewards.of_groups and compared and lease.purpose is Purpose.TRAIN):
            return [*rollouts]
        texts = [self._last_message(lease.prompt, rollout) for rollout in compared]
        try:
            async with timeout(seconds, self.outages):
                reasons = [rollout.finish_reason for rollout in compared]
                scores = iter(await rewards.score_group(lease.prompt, texts, reasons))
        except TimeoutError as error:
            raise RolloutTimeout(
                f"the rewards of the group of prompt {lease.prompt.prompt_id!r} took longer than "
                f"{seconds:g} s"
            ) from error
        return [
            rollout
            if rollout.finish_reason is FinishReason.TIMEOUT
            else replace(
                rollout,
                reward=rollout.reward + (score := next(scores)).total,
                reward_parts={**rollout.reward_parts, **score.parts},
            )
            for rollout in rollouts
        ]

    def _last_message(self, prompt: Prompt, rollout: Rollout) -> str:
        """Return the last message of the policy in a rollout, as its rewards have seen it."""
        mask, single = [*rollout.loss_mask], rollout.turns == 1
        began = rollout.prompt_length if single else len(mask) - mask[::-1].index(False)
        begun = self.renderer.begun(opening(prompt) if single else ())
        return self.stops.message([*rollout.token_ids], began, begun, rollout.finish_reason)


class Episode:
    """The state of one rollout, and the loop of its turns."""

    def __init__(
        self, runner: EpisodeRunner, lease: Lease, sample_index: int, saved: Rollout | None
    ) -> None:
        self._runner, self._config, self._lease = runner, runner.config, lease
        self._sample_index, self._saved = sample_index, saved
        self._created_at = saved.created_at if saved else datetime.fromtimestamp(clock.now(), UTC)
        self.conversation = Conversation(runner.new_environment, runner.config, lease.prompt)
        self._transcript = Transcript()
        self._prompt_length = 0
        self._turns = 0
        self._began = 0
        """Index of the first token of the policy's last message."""
        self._turn_rewards: list[TurnReward] = []
        self._begun = ""
        """Text that the policy's present message begins with, and that was not sampled."""
        self._reply = ""
        """The last message of the policy."""
        self._left_out = 0
        """Tokens of the environment's last message, where there was no space for them."""

    async def play(self) -> Rollout:
        """Take turns until the rollout ends, and score it unless it was interrupted."""
        messages = await self.conversation.begin()
        self._open(messages)
        self._begun = self._runner.renderer.begun(messages)
        finish_reason = None
        while finish_reason is None:
            finish_reason = await self._turn()
        if finish_reason is FinishReason.ABORTED:
            return self._unscored()
        return await self._scored(finish_reason)

    def timed_out(self, score: float) -> Rollout:
        """Return the rollout so far, with the score of one that took too long."""
        return replace(
            self._unscored(),
            reward=score,
            reward_parts={"timeout": score},
            finish_reason=FinishReason.TIMEOUT,
            turns=self._turns,
        )

    def _open(self, messages: Sequence[Message]) -> None:
        """Begin with the ids of the prompt, or with what was saved."""
        if self._saved is not None:
            self._transcript = Transcript.of(self._saved)
            self._prompt_length = self._saved.prompt_length
            return
        self._transcript.inject(self._rendered(self._runner.renderer.prompt, messages))
        self._prompt_length = len(self._transcript.token_ids)
        if not 1 <= self._prompt_length < self._runner.max_model_len:
            raise PromptRefused(
                f"prompt {self._lease.prompt.prompt_id!r} has {self._prompt_length} tokens, must "
                f"have from 1 to {self._runner.max_model_len - 1}, one less than "
                "actors.max_model_len"
            )

    async def _turn(self) -> FinishReason | None:
        """Let the policy and the environment speak; return how the rollout ended, if it did."""
        transcript, stops = self._transcript, self._runner.stops
        began = len(transcript.token_ids) if self._turns else self._prompt_length
        self._began = began
        self._turns += 1
        generation = await self._generate()
        transcript.sample(generation)
        finish_reason = generation.finish_reason
        length = stops.find(transcript.token_ids[began:])
        if length is not None:
            transcript.cut(began + length)
            finish_reason = FinishReason.STOP
        if finish_reason is FinishReason.ABORTED:
            return finish_reason
        self._reply = stops.message(transcript.token_ids, began, self._begun, finish_reason)
        turn = await self.conversation.step(self._reply)
        if turn.reward is not None:
            last_token = len(transcript.token_ids) - 1
            self._turn_rewards.append(TurnReward(last_token, float(turn.reward)))
        if turn.done or finish_reason is FinishReason.LENGTH:
            return finish_reason
        return None if self._goes_on(turn.messages) else FinishReason.LENGTH

    def _goes_on(self, messages: Sequence[Message]) -> bool:
        """Append messages; return False where they leave the policy no turn or space."""
        characters = sum(str.__len__(message.content) + 1 for message in messages)
        if characters > LONGEST_TOKEN * self._runner.max_model_len:
            self._left_out = self._runner.max_model_len
            return False
        last = self._transcript.token_ids[-1]
        ids = self._rendered(self._runner.renderer.continuation, messages, last)
        if self._turns == self._config.max_turns:
            return False
        if self._space(len(ids)) < 1:
            self._left_out = len(ids)
            return False
        self._transcript.inject(ids)
        self._begun = self._runner.renderer.begun(messages)
        return True

    def _rendered(self, render: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """Return the ids of messages; PromptRefused names the prompt."""
        try:
            return render(*arguments)
        except InputError:
            raise
        except Exception as error:
            problem = str(error) if isinstance(error, PromptRefused) else describe_error(error)
            prompt_id = self._lease.prompt.prompt_id
            raise PromptRefused(f"prompt {prompt_id!r}: {problem}") from error

    def _space(self, reply_length: int = 0) -> int:
        """Return how many tokens may still be sampled after a reply of the environment."""
        return min(
            self._config.max_new_tokens - self._transcript.sampled,
            self._runner.max_model_len - len(self._transcript.token_ids) - reply_length,
        )

    async def _generate(self) -> Generation:
        """Sample the next message of the policy; only the first one may end as interrupted."""
        config, lease, stops = self._config, self._lease, self._runner.stops
        request_id = f"{lease.group_id}/{lease.attempt}/{self._sample_index}/{self._turns}"
        sampling = SamplingParameters(
            temperature=config.temperature if lease.temperature is None else lease.temperature,
            max_new_tokens=self._space(),
            top_p=config.top_p,
            top_k=config.top_k,
            stop=stops.strings,
            stop_ids=stops.ids,
        )
        transcript = self._transcript
        try:
            generation = await self._runner.engine.generate(
                request_id, transcript.token_ids, sampling, cache_salt=transcript.cache_salt
            )
        except (EngineDied, EngineStale):
            raise
        except HeadwayError as error:
            raise RolloutFailed(f"request {request_id}: {error}") from error
        ended = generation.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        interrupted = generation.finish_reason is FinishReason.ABORTED and self._turns == 1
        if not ended and not interrupted:
            raise RolloutFailed(
                f"request {request_id} ended as {generation.finish_reason} after "
                f"{len(generation.token_ids)} tokens"
            )
        return generation

    async def _scored(self, finish_reason: FinishReason) -> Rollout:
        train = self._lease.purpose is Purpose.TRAIN
        rewards = self._runner.rewards if train else self._runner.heldout_rewards
        by_step = train and self._config.reward_model.each_step
        scored = self._lease.prompt, self._reply, finish_reason
        score = await rewards.score(*scored, by_step=by_step)
        environment_reward = sum((turn.reward for turn in self._turn_rewards), 0.0)
        step_rewards = self._step_rewards(score.steps)
        parts = score.parts
        if self._config.environment != "single_turn":
            parts = {"environment": environment_reward, **parts}
        shaping: dict[str, float] = {}
        gold: dict[str, float] = {}
        if train:
            if self._runner.gold is not None:
                gold = await self._runner.gold.parts(self._lease.prompt, self._reply, finish_reason)
            sampled, after = self._transcript.sampled, len(self._transcript.token_ids)
            shaping = shaping_parts(
                self._config,
                sampled,
                finish_reason,
                space=self._runner.max_model_len - self._prompt_length,
                injected=after - self._prompt_length - sampled + self._left_out,
            )
        return replace(
            self._unscored(),
            reward=score.total
            + environment_reward
            + sum(step.reward for step in step_rewards)
            + sum(shaping.values()),
            reward_parts={**parts, **shaping, **gold},
            finish_reason=finish_reason,
            turns=self._turns,
            turn_rewards=(*self._turn_rewards, *step_rewards),
        )

    def _step_rewards(self, steps: Sequence[tuple[int, float]]) -> list[TurnReward]:
        """Return the scores of steps of the last message, each at the token that ends its step."""
        ids, began = self._transcript.token_ids, self._began
        of_tokens = range(began + 1, len(ids) + 1)

        def length(tokens: int) -> int:
            text = self._runner.stops.message(ids[:tokens], began, self._begun, FinishReason.LENGTH)
            return len(text)

        ends = [began + bisect_left(of_tokens, end, key=length) for end, _ in steps]
        last = max((end for end, _ in steps), default=0)
        return [
            TurnReward(len(ids) - 1 if end == last else min(token, len(ids) - 1), score)
            for token, (end, score) in zip(ends, steps, strict=True)
        ]

    def _unscored(self) -> Rollout:
        """Return the rollout so far as one that was interrupted in its first turn."""
        transcript = self._transcript
        return Rollout(
            sample_index=self._sample_index,
            token_ids=transcript.token_ids,
            prompt_length=self._prompt_length,
            loss_mask=transcript.loss_mask,
            behavior_logprobs=transcript.behavior_logprobs,
            versions=transcript.versions,
            reward=0.0,
            reward_parts={},
            finish_reason=FinishReason.ABORTED,
            turns=1,
            environment=self._config.environment,
            engine_id=self._runner.engine_id,
            created_at=self._created_at,
            finished_at=datetime.fromtimestamp(clock.now(), UTC),
        )
