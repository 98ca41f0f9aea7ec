"""Translation of Ray's errors into errors of this package."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray.exceptions

from headway.errors import HeadwayError


@contextmanager
def remote_errors(
    actor: str, seconds: float, *, gone: type[HeadwayError], late: type[HeadwayError]
) -> Iterator[None]:
    """Run a call of a Ray actor's method; raise its own error, or `gone` or `late`.

    `late` replaces a TimeoutError of the block; `gone` is raised if the actor is dead or cannot be
    reached. `actor` names it in error messages.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except TimeoutError as error:
        raise late(f"{actor} did not answer within {seconds:g} s") from error
    except ray.exceptions.RayError as error:
        raise gone(f"{actor} is gone: {error}") from error
