"""Remote calls of ranks: their deadline, and the translation of their failures. Imports no torch.

A rank that dies takes others with it: they lose their connection to it, and may fail first.
"""

import asyncio
from typing import Any

from ray.exceptions import RayError, RayTaskError

from headway.errors import HeadwayError
from headway.ray_process import death_of
from learner.errors import RankFailed

CONNECTION_TEXTS = (
    "gloo/transport", "Connection closed by peer", "Connection reset by peer",
    "connection reset by peer", "Broken pipe", "Timed out waiting", "Socket Timeout",
    "Application timeout",
)  # fmt: skip
"""Parts of the messages with which Gloo and the store of torch lose a connection."""


async def call_rank(rank: int, reference: Any, *, timeout: float | None = None) -> Any:
    """Await the result of a remote call to a rank; without a `timeout` in seconds, for ever.

    Raises:
        RankFailed: The rank died or raised.
        TimeoutError: It did not answer in time.
    """
    try:
        async with asyncio.timeout(timeout):
            return await reference
    except RayError as error:
        raise rank_failure(rank, error) from error


def rank_failure(rank: int, error: RayError) -> RankFailed:
    """Translate a rank's death, or the error it raised, into an error with its number."""
    if not isinstance(error, RayTaskError):
        return RankFailed(f"rank {rank} died: {death_of(error)}", died=True)
    cause: Any = error.cause or error
    if isinstance(cause, RankFailed):
        return cause
    ours = isinstance(cause, HeadwayError)
    return RankFailed(
        f"rank {rank}: {cause if ours else repr(cause)}",
        exit_code=cause.exit_code if ours else 1,
        died=_is_a(cause, "AcceleratorError"),  # but no lack of memory: a new process may go on
        is_root_cause=ours or not _is_lost_connection(cause),
    )


def _is_lost_connection(error: Any) -> bool:
    """Return True for torch's errors of communication; those of Gloo are plain RuntimeErrors."""
    if _is_a(error, "DistError"):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in CONNECTION_TEXTS)


def _is_a(error: Any, name: str) -> bool:
    """Return True if an error is of torch's type of this name, without importing torch."""
    return any(base.__name__ == name for base in type(error).__mro__)
