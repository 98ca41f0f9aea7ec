"""The part of a rollout that is the same for conversations and for agents: deadline and rewards.

run ─▶ begin ─▶ Play.play, within the deadline ─▶ scored ─▶ all of a group: score_group
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from actors.config import ActorsConfig
from actors.engines.protocol import SamplingParameters
from actors.environments.single_turn import opening
from actors.errors import AnswerLate, EnvironmentFailed, RolloutTimeout
from actors.outages import Outages, outage, timeout, waits_on_network
from actors.rewards.gold import GoldReward
from actors.rewards.rewards import Rewards
from actors.rewards.shaping import shaping_parts
from actors.rollout.agent_statistics import AgentStatistics
from actors.rollout.chat_rendering import Renderer
from actors.rollout.stops import Stops, load_stops
from headway import clock
from queues.protocols import WorkQueue
from queues.records import FinishReason, Lease, Prompt, Purpose, Rollout, TurnReward

Steps = Callable[[Sequence[tuple[int, float]]], list[TurnReward]]
"""Finds the tokens that end the steps of a last message, as `rewards.Score.steps` has them."""


def sampling_of(
    config: ActorsConfig, stops: Stops, max_new_tokens: int, temperature: float | None = None
) -> SamplingParameters:
    """Return how the policy is sampled: as the recipe says, None for its temperature too."""
    return SamplingParameters(
        temperature=config.temperature if temperature is None else temperature,
        max_new_tokens=max_new_tokens,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=stops.strings,
        stop_ids=stops.ids,
    )


class Play(Protocol):
    """One rollout while it is played."""

    @property
    def answering_seconds(self) -> float:
        """Time that the policy waited for answers so far."""

    async def play(self) -> Rollout:
        """Return the rollout with its rewards; raises as `RolloutRunner.run`."""

    def unscored(self) -> Rollout:
        """Return the rollout so far, without a reward."""


@dataclass(slots=True, kw_only=True)
class RolloutRunner(ABC):
    """Turns leases into rollouts; one runner serves all rollouts of an actor."""

    engine_id: str
    renderer: Renderer
    config: ActorsConfig
    """Sampling, limits and penalties; a lease may give another temperature."""
    rewards: Rewards
    heldout_rewards: Rewards
    max_model_len: int
    """Longest rollout in tokens."""
    gold: GoldReward | None = None
    work: WorkQueue | None = None
    """Keeps the turns of training rollouts; None keeps none."""
    statistics: AgentStatistics = field(default_factory=AgentStatistics)
    stops: Stops = field(init=False)
    outages: Outages = field(init=False)

    def __post_init__(self) -> None:
        self.outages = Outages(self.config.outage_seconds)
        self.stops = load_stops(self.renderer, self.config.stop, include=self.config.include_stop)

    async def start(self) -> None:  # noqa: B027  (not every rollout needs anything)
        """Start what all rollouts share, once the engine runs; raises HeadwayError."""

    def interrupt(self) -> None:  # noqa: B027
        """End rollouts that wait for something else than the engine, which is interrupted."""

    async def close(self) -> None:  # noqa: B027
        """End what `start` has started, before the engine ends."""

    @abstractmethod
    def begin(self, lease: Lease, sample_index: int, saved: Rollout | None) -> Play:
        """Return a rollout that is not played yet."""

    async def run(self, lease: Lease, sample_index: int, saved: Rollout | None = None) -> Rollout:
        """Sample and score one rollout of a group; go on from `saved` and the notes of the lease.

        The result is `aborted` and without a reward where the engine was interrupted. Where answers
        to the policy took too long, it has the reward `actors.on_timeout`, if that is a number.
        Raises RolloutFailed, whose subclass gives the reason, EngineDied, and ServiceLost.
        """
        seconds, score = self.config.rollout_timeout_seconds, self.config.on_timeout
        try:
            async with timeout(seconds, self.outages) as deadline:
                play = self.begin(lease, sample_index, saved)
                return await play.play()
        except AnswerLate as late:
            if score == "fail":
                raise EnvironmentFailed(str(late)) from late
            return _timed_out(play, score)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            by_policy = 2 * play.answering_seconds > seconds
            if score != "fail" and by_policy and not (outage(error) or waits_on_network()):
                return _timed_out(play, score)
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

    async def scored(
        self,
        lease: Lease,
        rollout: Rollout,
        reply: str,
        own: Mapping[str, float],
        *,
        steps: Steps | None = None,
        left_out: int = 0,
    ) -> Rollout:
        """Return a finished rollout with its rewards; raises RewardFailed and Excused.

        `reply` is what the rewards read. `own` adds up to the reward that the environment gave.
        Without `steps` the scores of single steps are not told apart. `left_out` counts tokens that
        the environment said last, and for which there was no space.
        """
        train, ended = lease.purpose is Purpose.TRAIN, rollout.finish_reason
        rewards = self.rewards if train else self.heldout_rewards
        by_step = steps is not None and train and self.config.reward_model.each_step
        score = await rewards.score(lease.prompt, reply, ended, by_step=by_step)
        of_steps = steps(score.steps) if steps is not None else []
        shaping: dict[str, float] = {}
        gold: dict[str, float] = {}
        if train:
            if self.gold is not None:
                gold = await self.gold.parts(lease.prompt, reply, ended)
            sampled, given = sum(rollout.loss_mask), rollout.prompt_length
            shaping = shaping_parts(
                self.config,
                sampled,
                ended,
                space=self.max_model_len - given,
                injected=len(rollout.token_ids) - given - sampled + left_out,
            )
        return replace(
            rollout,
            reward=score.total
            + sum(own.values())
            + sum(step.reward for step in of_steps)
            + sum(shaping.values()),
            reward_parts={**own, **score.parts, **shaping, **gold},
            turn_rewards=(*rollout.turn_rewards, *of_steps),
        )

    def unscored(self, sample_index: int, created_at: datetime, **fields: Any) -> Rollout:
        """Return a rollout with these tokens, without a reward, as one that was interrupted."""
        values = {
            "reward": 0.0,
            "reward_parts": {},
            "finish_reason": FinishReason.ABORTED,
            "turns": 1,
            **fields,
        }
        return Rollout(
            sample_index=sample_index,
            environment=self.config.environment,
            engine_id=self.engine_id,
            created_at=created_at,
            finished_at=datetime.fromtimestamp(clock.now(), UTC),
            **values,
        )

    def _last_message(self, prompt: Prompt, rollout: Rollout) -> str:
        """Return the last message of the policy in a rollout, as its rewards have seen it."""
        mask, single = [*rollout.loss_mask], rollout.turns == 1
        began = rollout.prompt_length if single else len(mask) - mask[::-1].index(False)
        began = max([began, *(segment.start for segment in rollout.segments)])
        begun = self.renderer.begun(opening(prompt) if single else ())
        return self.stops.message([*rollout.token_ids], began, begun, rollout.finish_reason)


def _timed_out(play: Play, score: float) -> Rollout:
    """Return the rollout so far, with the score of one that took too long."""
    return replace(
        play.unscored(),
        reward=score,
        reward_parts={"timeout": score},
        finish_reason=FinishReason.TIMEOUT,
    )
