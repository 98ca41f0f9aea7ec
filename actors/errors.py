"""Errors of rollout actors."""

from typing import ClassVar

from headway.errors import HeadwayError, InputError
from queues.errors import QueueClosed
from queues.records import INFRASTRUCTURE, REWARD_MODEL_LOST


class SourceChanged(InputError):
    """A source's prompts are not those that a cursor was taken from; names what changed."""


class SourceFailed(HeadwayError):
    """The prompt source broke its contract in the middle of a run; names what it did."""


class EngineStale(HeadwayError):
    """The engine was asked to generate before its first policy version."""


class EngineDied(HeadwayError):
    """A process of the engine is gone; the engine has to be built again."""


class RolloutFailed(HeadwayError):
    """One rollout has no result; the engine lives, and other rollouts go on."""

    reason: ClassVar[str] = "engine"
    """Reason under which the group counts as failed if no further attempt succeeds."""


class PromptRefused(RolloutFailed):
    """The prompt has no token, or leaves no space for an answer; names it and the limit."""

    reason: ClassVar[str] = "prompt"


class EnvironmentFailed(RolloutFailed):
    """The environment broke its contract; names it and the prompt."""

    reason: ClassVar[str] = "environment"


class AnswerLate(EnvironmentFailed):
    """The environment took too long to answer the policy, and did not wait for a service."""


class RewardFailed(RolloutFailed):
    """A reward gave no score; names it and the prompt. It never counts as 0."""

    reason: ClassVar[str] = "reward"


class Excused(RolloutFailed):
    """The infrastructure failed, and neither policy nor prompt; no attempt of the group counts."""

    reason: ClassVar[str] = INFRASTRUCTURE


class ServiceAway(Excused):
    """A service that a reward, a tool or an environment needs is away: it is waited for.

    Rewards, tools and environments of users may raise it. The call is repeated with growing pauses,
    of `retry_after` seconds at least, within `actors.outage_seconds`.
    """

    def __init__(
        self, *message: object, retry_after: float = 0.0, exit_code: int | None = None
    ) -> None:
        super().__init__(*message, exit_code=exit_code)
        self.retry_after = retry_after


class RewardModelLost(ServiceAway):
    """The reward models are gone or too slow."""

    reason: ClassVar[str] = REWARD_MODEL_LOST


class ServiceLost(HeadwayError):
    """A service was away for longer than `actors.outage_seconds`: the run cannot go on."""


class RolloutTimeout(RolloutFailed):
    """The rollout did not end within `actors.rollout_timeout_seconds`."""

    reason: ClassVar[str] = "timeout"


def root_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error besides failed rollouts and the end of the run; else the first."""
    others = (RolloutFailed, QueueClosed, BaseExceptionGroup)
    error: BaseException = errors.subgroup(lambda leaf: not isinstance(leaf, others)) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
