"""One rollout of an agent: a session of the gateway, in which it asks as it likes.

    lease ─▶ session, with the turns of earlier attempts ─▶ agent ─▶ its result ─▶ rewards
                 ▲ turns, each noted before its answer goes out │
                 └────────────── requests to the policy ◀───────┘

An agent is ended when its engine has died or was interrupted. Another attempt starts it anew: the
requests that it repeats get the answers that were noted, and the policy goes on after these.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from actors.environments.single_turn import opening
from actors.errors import EnvironmentFailed, RolloutFailed
from actors.gateway.open_session import OpenSession, SessionLimits
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.programs.agent import Agent, AgentGone, AgentResult, AgentTask
from actors.rollout.notes import Notes, noted_turns
from actors.rollout.runner import RolloutRunner
from headway import clock
from headway.errors import HeadwayError
from queues.records import FinishReason, Lease, Purpose, Rollout, Turn

MOST_GONE = 3
"""Times that an agent is played in one attempt, where it was lost."""
CUT_OFF = AgentResult(reward={"environment": 0.0})
"""Result of an agent that failed after its session had reached a limit."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class AgentRunner(RolloutRunner):
    """Plays an agent, with a session of the gateway for each rollout."""

    agent: Agent
    gateway: Gateway
    new_session: Callable[[Sequence[Turn]], Session]
    """Makes a session that knows the turns of earlier attempts."""
    sessions: set[OpenSession] = field(default_factory=set)
    """Sessions of the agents that are playing."""

    async def start(self) -> None:
        """Start the gateway; raise HeadwayError if it cannot serve."""
        self.statistics.agent = self.config.environment
        try:
            await self.gateway.start()
        except OSError as error:
            raise HeadwayError(f"the gateway for agents was not started: {error}") from error

    def interrupt(self) -> None:
        """End all agents, whatever they are doing."""
        for opened in self.sessions:
            opened.stop()

    async def close(self) -> None:
        """Close all sessions and the gateway, and end the agent."""
        try:
            await self.gateway.close()
        finally:
            await self.agent.close()

    def begin(self, lease: Lease, sample_index: int, saved: Rollout | None) -> "AgentPlay":
        """Return the rollout of an agent; the notes of its lease have its turns."""
        return AgentPlay(self, lease, sample_index)


class AgentPlay:
    """The state of one rollout of an agent."""

    def __init__(self, runner: AgentRunner, lease: Lease, sample_index: int) -> None:
        self._runner, self._lease, self._sample_index = runner, lease, sample_index
        trains = lease.purpose is Purpose.TRAIN
        self._notes = Notes(runner.work if trains else None, runner.engine_id, lease, sample_index)
        self._turns = noted_turns(lease, sample_index)
        """All turns that were noted, by number."""
        self._created_at = datetime.fromtimestamp(clock.now(), UTC)
        self._began = clock.now()
        self._finish_reason = FinishReason.STOP
        self._session: Session = runner.new_session(())
        self._opened: OpenSession | None = None

    @property
    def answering_seconds(self) -> float:
        """Time in which the policy waited for the agent, from its first turn on."""
        if self._opened is None or not self._session.turns:
            return 0.0
        return clock.now() - self._began - self._opened.model_seconds

    async def play(self) -> Rollout:
        """Run the agent in a session, and score what it did; see `RolloutRunner.run`."""
        for plays in range(1, MOST_GONE + 1):
            try:
                result = await self._play_once()
                break
            except AgentGone:
                if plays == MOST_GONE:
                    raise
        return await self._scored(result)

    def unscored(self) -> Rollout:
        """Return the rollout so far, without a reward."""
        return self._runner.unscored(
            self._sample_index, self._created_at, **self._session.tokens()._asdict()
        )

    async def _play_once(self) -> AgentResult:
        runner, config, lease = self._runner, self._runner.config, self._lease
        self._session = runner.new_session([*self._turns.values()])
        limits = SessionLimits(
            turns=config.max_turns,
            tokens=config.max_new_tokens,
            seconds=config.rollout_timeout_seconds,
            temperature=lease.temperature,
        )
        opened = self._opened = runner.gateway.open(self._session, limits, self._on_turn)
        prompt = lease.prompt
        task = AgentTask(
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            messages=[{"role": m.role, "content": m.content} for m in opening(prompt)],
            answer=prompt.answer,
            metadata=prompt.metadata,
            base_url=opened.base_url,
            api_key=opened.key,
            rollout_id=f"{lease.group_id}/{self._sample_index}",
            turns=len(self._turns),
        )
        runner.sessions.add(opened)
        with runner.statistics.session(lambda: opened.model_seconds):
            try:
                return await self._result(task, opened)
            finally:
                runner.sessions.discard(opened)
                await opened.close()

    async def _result(self, task: AgentTask, opened: OpenSession) -> AgentResult:
        """Return the result of the agent, unless the policy stops first."""
        playing = asyncio.ensure_future(self._runner.agent.play(task))
        stopping = asyncio.create_task(opened.stopped.wait())
        try:
            await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if opened.failure is not None:
                raise opened.failure
            if opened.interrupted:
                raise RolloutFailed(
                    f"the engine was interrupted while agent {self._runner.config.environment!r} "
                    f"played prompt {task.prompt_id!r}"
                )
            return playing.result()
        except EnvironmentFailed as error:
            if opened.limit is None:
                raise
            log.debug("an agent failed at a limit: %s", error)
            return CUT_OFF
        finally:
            for running in (playing, stopping):
                running.cancel()
            await asyncio.gather(playing, stopping, return_exceptions=True)

    async def _on_turn(self, turn: Turn) -> None:
        """Note a turn that is complete, before the agent has the whole answer."""
        self._finish_reason = turn.finish_reason
        if turn.number not in self._turns:
            await self._notes.add(turn)
            self._turns[turn.number] = turn
            self._runner.statistics.turns += 1

    async def _scored(self, result: AgentResult) -> Rollout:
        runner, name = self._runner, self._runner.config.environment
        rollout, where = self.unscored(), f"on prompt {self._lease.prompt.prompt_id!r}"
        if not any(rollout.loss_mask):
            raise EnvironmentFailed(f"agent {name!r} ended {where} without an answer of the policy")
        if result.reward is None and not runner.config.reward:
            raise EnvironmentFailed(
                f"agent {name!r} gave no reward {where}, and actors.reward names none"
            )
        runner.statistics.count(
            turns=rollout.turns,
            segments=len(rollout.segments),
            sampled=sum(rollout.loss_mask),
            left_out=rollout.left_out,
        )
        limit = self._opened.limit if self._opened else None
        ended = self._finish_reason if limit is None else FinishReason.LENGTH
        text = self._session.reply if result.completion is None else result.completion
        return await runner.scored(
            self._lease, replace(rollout, finish_reason=ended), text, result.reward or {}
        )
