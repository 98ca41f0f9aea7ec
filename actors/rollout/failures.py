"""Which of several errors of concurrent tasks is the one to report."""

from actors.errors import RolloutFailed
from queues.errors import QueueClosed


def root_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is neither a failed rollout nor the end of the run; else the first."""
    leaves = _leaves(errors)
    return next(
        (error for error in leaves if not isinstance(error, (RolloutFailed, QueueClosed))),
        leaves[0],
    )


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
