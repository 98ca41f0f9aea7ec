"""Translation of the errors with which Ray's calls of the broker end.

Ray has many errors for a process that is gone or cannot be started, such as for want of memory;
only a RayTaskError comes from a process that lives.
"""

from collections.abc import Awaitable
from typing import Any, Never

from ray.exceptions import RayActorError, RayError, RayTaskError

from headway.errors import HeadwayError
from queues.errors import BrokerLostError


async def until_death(call: Awaitable[Any]) -> None:
    """Await a call that only the end of its process fails; raise RayActorError or our own error."""
    try:
        await call
    except RayActorError:
        raise
    except RayError as error:
        raise_translated(error)


def raise_translated(error: RayError) -> Never:
    """Raise our own exception inside Ray's, or BrokerLostError; that of a bug as it is."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else error.__cause__
    if isinstance(cause, HeadwayError):
        raise cause from error
    if isinstance(error, RayTaskError):
        raise error
    raise BrokerLostError(f"the broker's process is gone: {error}") from error
