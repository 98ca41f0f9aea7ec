"""One rollout: the policy and its environment take turns, and rewards score the end.

    environment.reset ─▶ ids of the prompt ─▶ engine.generate ─▶ environment.step ─▶ rewards
                                                    ▲                   │ not done
                                                    └── injected ids ◀──┘

A rollout whose engine is interrupted ends as `aborted`, with the tokens that it has, and any engine
can go on with it. In a conversation of several turns every turn is noted in the ledger before the
environment hears of it (`actors.rollout.notes`). Another attempt begins a new environment, repeats
to it what the policy said, and samples what was not noted. Calls of the environment `tools` are not
made again. Where an environment answers otherwise than before, which the ids of the next turn's
prompt tell, the rollout goes on afresh from there, without notes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from actors.engines.protocol import Generation, RolloutEngine
from actors.environments.protocol import Environment, Message
from actors.errors import EngineDied, EngineStale, PromptRefused, RolloutFailed
from actors.rollout.conversation import Conversation
from actors.rollout.notes import Notes
from actors.rollout.runner import RolloutRunner, sampling_of
from actors.rollout.transcript import Transcript
from headway import clock
from headway.errors import HeadwayError, InputError
from headway.user_code import describe_error
from queues.records import FinishReason, Lease, Purpose, Rollout, Turn, TurnReward

LONGEST_TOKEN = 200
"""Characters of a token at most, for an answer of an environment to be tokenised at all."""


@dataclass(slots=True, kw_only=True)
class EpisodeRunner(RolloutRunner):
    """Plays the conversations of an environment."""

    engine: RolloutEngine
    new_environment: Callable[[], Environment]

    def begin(self, lease: Lease, sample_index: int, saved: Rollout | None) -> "Episode":
        """Return the conversation; it is not begun."""
        return Episode(self, lease, sample_index, saved)


class Episode:
    """The state of one rollout, and the loop of its turns."""

    def __init__(
        self, runner: EpisodeRunner, lease: Lease, sample_index: int, saved: Rollout | None
    ) -> None:
        self._runner, self._config, self._lease = runner, runner.config, lease
        self._sample_index, self._saved = sample_index, saved
        several = runner.config.environment != "single_turn" and lease.purpose is Purpose.TRAIN
        self._notes = Notes(runner.work if several else None, runner.engine_id, lease, sample_index)
        self._created_at = saved.created_at if saved else datetime.fromtimestamp(clock.now(), UTC)
        self.conversation = Conversation(
            runner.new_environment, runner.config, lease.prompt, runner.statistics
        )
        self._transcript = Transcript()
        self._prompt_length = 0
        self._turns = 0
        self._began = 0
        """Index of the first token of the policy's last message."""
        self._ended = 0
        """Index after the last token of the message before it."""
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
            return self.unscored()
        return await self._scored(finish_reason)

    @property
    def answering_seconds(self) -> float:
        """Time that the environment took to answer so far."""
        return self.conversation.answering_seconds

    def unscored(self) -> Rollout:
        """Return the rollout so far, without a reward."""
        transcript = self._transcript
        return self._runner.unscored(
            self._sample_index,
            self._created_at,
            token_ids=transcript.token_ids,
            prompt_length=self._prompt_length,
            loss_mask=transcript.loss_mask,
            behavior_logprobs=transcript.behavior_logprobs,
            versions=transcript.versions,
            turns=self._turns,
        )

    def _open(self, messages: Sequence[Message]) -> None:
        """Begin with the ids of the prompt."""
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
        transcript, number = self._transcript, self._turns
        self._began = began = len(transcript.token_ids)
        self._turns += 1
        finish_reason = self._repeated(number) or await self._sampled(number)
        if finish_reason is FinishReason.ABORTED:
            return finish_reason
        self._ended, message = len(transcript.token_ids), self._runner.stops.message
        self._reply = message(transcript.token_ids, began, self._begun, finish_reason)
        turn = await self.conversation.step(self._reply, partial(self._notes.recall, number))
        if turn.reward is not None:
            last_token = len(transcript.token_ids) - 1
            self._turn_rewards.append(TurnReward(last_token, float(turn.reward)))
        if turn.done or finish_reason is FinishReason.LENGTH:
            return finish_reason
        return None if self._goes_on(turn.messages) else FinishReason.LENGTH

    def _repeated(self, number: int) -> FinishReason | None:
        """Repeat a noted message of the policy, and return how it ended; None if there is none."""
        turn = self._notes.turn(number)
        if turn is None:
            return None
        if [*turn.injected] != self._transcript.token_ids[self._ended :]:
            self._notes.leave()
            return None
        self._transcript.sample(turn.token_ids, turn.behavior_logprobs, turn.versions)
        return turn.finish_reason

    async def _sampled(self, number: int) -> FinishReason:
        """Sample a message of the policy and note it; return how it ended."""
        transcript, began = self._transcript, self._began
        self._take_saved(began)
        generation = await self._generate()
        transcript.sample(generation.token_ids, generation.logprobs, generation.versions)
        transcript.cache_salt = generation.cache_salt
        finish_reason = generation.finish_reason
        length = self._runner.stops.find(transcript.token_ids[began:])
        if length is not None:
            transcript.cut(began + length)
            finish_reason = FinishReason.STOP
        if finish_reason is not FinishReason.ABORTED:
            turn = Turn(
                number=number,
                parent=number - 1,
                shared=self._ended,
                injected=transcript.token_ids[self._ended : began],
                token_ids=transcript.token_ids[began:],
                behavior_logprobs=transcript.behavior_logprobs[began:],
                versions=transcript.versions[began:],
                finish_reason=finish_reason,
                cache_salt=generation.cache_salt,
            )
            await self._notes.add(turn)
        return finish_reason

    def _take_saved(self, began: int) -> None:
        """Append what was sampled of this message when it was interrupted, if all before agrees."""
        saved = self._saved
        if saved is None or saved.turns != self._turns or not all(saved.loss_mask[began:]):
            return
        if [*saved.token_ids[:began]] == self._transcript.token_ids:
            logprobs, versions = saved.behavior_logprobs[began:], saved.versions[began:]
            self._transcript.sample(saved.token_ids[began:], logprobs, versions)

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
        """Sample the next message of the policy, or the rest of it."""
        lease, stops, space = self._lease, self._runner.stops, self._space()
        request_id = f"{lease.group_id}/{lease.attempt}/{self._sample_index}/{self._turns}"
        sampling = sampling_of(self._config, stops, space, lease.temperature)
        transcript = self._transcript
        try:
            generation = await self._runner.engine.generate(
                request_id, transcript.token_ids, sampling, cache_salt=transcript.cache_salt
            )
        except (EngineDied, EngineStale):
            raise
        except HeadwayError as error:
            raise RolloutFailed(f"request {request_id}: {error}") from error
        ends = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED
        if generation.finish_reason not in ends:
            raise RolloutFailed(
                f"request {request_id} ended as {generation.finish_reason} after "
                f"{len(generation.token_ids)} tokens"
            )
        return generation

    async def _scored(self, finish_reason: FinishReason) -> Rollout:
        own: dict[str, float] = {}
        if self._config.environment != "single_turn":
            own["environment"] = sum((turn.reward for turn in self._turn_rewards), 0.0)
        rollout = replace(
            self.unscored(), finish_reason=finish_reason, turn_rewards=self._turn_rewards
        )
        return await self._runner.scored(
            self._lease,
            rollout,
            self._reply,
            own,
            steps=self._step_rewards,
            left_out=self._left_out,
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
