"""Translation of Ray's errors into errors of this package."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray.exceptions

from weight_sync.errors import WeightSyncError


@contextmanager
def remote_errors(
    actor: str, seconds: float, *, gone: type[WeightSyncError], late: type[WeightSyncError]
) -> Iterator[None]:
    """Run a call of a Ray actor's method and translate what it raises.

    Args:
        actor: Name of the actor in error messages.
        seconds: Deadline of the call, for the error message; the block sets it.
        gone: Raised if the actor is dead or cannot be reached.
        late: Raised if the block raises a TimeoutError, as `ray.get` does.

    Raises:
        Exception: The error that the method itself raised, as its own class.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except TimeoutError as error:
        raise late(f"{actor} did not answer within {seconds:g} s") from error
    except ray.exceptions.RayError as error:
        raise gone(f"{actor} is gone: {error}") from error
