"""What the failure of a rank looks like to those who wait for it. Imports no torch.

A rank that dies takes others with it: they lose their connection to it, and may be heard first.
"""

from typing import Any

from ray.exceptions import RayTaskError

from learner.errors import RankFailed


def explains(error: BaseException) -> bool:
    """Whether a failed call tells of a cause, and not perhaps of what another rank's death caused.

    A death does, and what a rank raised but for a foreign RuntimeError: that is all that torch says
    of a connection it lost.
    """
    if not isinstance(error, RayTaskError):
        return True
    cause = error.cause
    if isinstance(cause, RankFailed):
        return cause.explains
    return hasattr(cause, "exit_code") or not isinstance(cause, RuntimeError)


def failure(rank: int, error: BaseException) -> RankFailed:
    """A rank's death, or what it raised, with its number."""
    if not isinstance(error, RayTaskError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return RankFailed(f"rank {rank} died: {lines[0]}")
    cause: Any = error.cause or error
    if isinstance(cause, RankFailed):
        return cause
    ours = hasattr(cause, "exit_code")
    failed = RankFailed(f"rank {rank}: {cause if ours else repr(cause)}")
    failed.exit_code = getattr(cause, "exit_code", 1)  # type: ignore[misc]
    failed.explains = explains(error)
    return failed
