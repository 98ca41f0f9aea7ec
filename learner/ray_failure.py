"""What the failure of a rank looks like to those who wait for it. Imports no torch."""

from typing import Any

from ray.exceptions import RayTaskError

from learner.errors import RankFailed


def explains(error: BaseException | None) -> bool:
    """Whether a failed call tells of a death, or of an error that was raised on purpose."""
    return not isinstance(error, RayTaskError) or hasattr(error.cause, "exit_code")


def failure(rank: int, error: BaseException) -> RankFailed:
    """A rank's death, or what it raised, under its name."""
    if not isinstance(error, RayTaskError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return RankFailed(f"learner-{rank} died: {lines[0]}")
    cause: Any = error.cause or error
    if isinstance(cause, RankFailed):
        return cause
    ours = hasattr(cause, "exit_code")
    failed = RankFailed(f"learner-{rank}: {cause if ours else repr(cause)}")
    failed.exit_code = getattr(cause, "exit_code", 1)  # type: ignore[misc]
    return failed
