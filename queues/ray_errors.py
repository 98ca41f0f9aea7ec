"""Translation of the errors with which Ray's calls of the broker end.

Ray has many errors for a process that is gone or cannot be started, such as for want of memory;
only a RayTaskError comes from a process that lives.
"""

from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from queues.errors import BrokerLostError, QueuesError


async def until_death(call: Awaitable[Any]) -> None:
    """Await a call that only the end of its process fails; raise RayActorError or our own error."""
    try:
        await call
    except RayActorError:
        raise
    except RayError as error:
        raise translated(error) from error


def translated(error: RayError) -> Exception:
    """Return our own exception inside Ray's, or BrokerLostError; a bug's error stays as it is."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else error.__cause__
    if isinstance(cause, QueuesError):
        return cause
    if isinstance(error, RayTaskError):
        bug: Exception = error
        return bug
    return BrokerLostError(f"the broker's process is gone: {error}")
