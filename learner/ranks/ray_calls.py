"""Remote calls of ranks: their deadline, and the translation of their failures. Imports no torch.

A rank that dies takes others with it: they lose their connection to it, and may fail first.
"""

import asyncio
from typing import Any

from ray.exceptions import RayError, RayTaskError

from learner.errors import RankFailed


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
        lines = str(error).strip().splitlines() or [type(error).__name__]
        failed = RankFailed(f"rank {rank} died: {lines[0]}")
        failed.died = True
        return failed
    cause: Any = error.cause or error
    if isinstance(cause, RankFailed):
        return cause
    ours = hasattr(cause, "exit_code")
    failed = RankFailed(f"rank {rank}: {cause if ours else repr(cause)}")
    failed.exit_code = getattr(cause, "exit_code", 1)  # type: ignore[misc]
    # torch raises a plain RuntimeError for a lost connection, whatever the reason.
    failed.is_root_cause = ours or not isinstance(cause, RuntimeError)
    return failed
