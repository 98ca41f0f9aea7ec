"""Processes in Ray as their callers see them: deadlines, repeated calls, epochs.

    caller ─call─▶ process                          its answer, or the error that it raised
                      │ is restarted by Ray         the call is sent again
                      │ has lost the call           no answer: the call is sent again
                      │ is gone, or never answers   `RayService.lost`

Ray has many errors for a process that is gone; only a RayTaskError comes from one that lives.
"""

import asyncio
import copy
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from headway.errors import HeadwayError
from headway.metrics import MetricsAccess
from headway.ray_process import serve_metrics
from headway.roles import Role

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MAX_CONCURRENCY = 10_000
"""Calls that may wait in a service at once, long polls included."""
ANSWER_SECONDS = 30.0
"""Time after which a call is sent again, beyond the wait that it asks for."""
GIVE_UP_FACTOR = 20.0
"""A call is given up after so many times `answer_seconds` without an answer."""
GIVE_UP_SECONDS = GIVE_UP_FACTOR * ANSWER_SECONDS
"""Time after which a client with the usual ANSWER_SECONDS gives up."""
REPEAT_SECONDS = 0.2
"""Wait before a call is sent again to a process that is restarted."""
START_SECONDS = 120.0
"""Deadline of a new process to answer."""


def translated(error: RayError, process: str, lost: type[HeadwayError]) -> Exception:
    """Return what a failed call means: an error of ours, a bug of the process, or its loss."""
    cause = error.cause if isinstance(error, RayTaskError) else error.__cause__
    if isinstance(cause, HeadwayError):
        return cause
    return error if isinstance(error, RayTaskError) else lost(f"{process} is gone: {error}")


def answer_of(
    pending: Any,
    process: str,
    seconds: float | None,
    *,
    gone: type[HeadwayError],
    late: type[HeadwayError],
) -> Any:
    """Wait for a call in this thread, for ever if `seconds` is None.

    Raises what its method raised, `gone` for a process that cannot be reached, or `late`.
    """
    try:
        return ray.get(pending, timeout=seconds)
    except RayTaskError as error:
        raise error.cause from error
    except GetTimeoutError as error:
        raise late(f"{process} did not answer within {seconds:g} s") from error
    except RayError as error:
        raise gone(f"{process} is gone: {error}") from error


class RayService:
    """Client of a `ServiceProcess` that is made again when it dies; can be sent to other processes.

    Every call raises what its method raised, or `lost` if the process is gone for good or gives no
    answer for GIVE_UP_FACTOR times `answer_seconds`, beyond the wait that the call asks for. A call
    may reach the process several times, so that methods are to be repeatable without harm.
    """

    role: ClassVar[Role]
    lost: ClassVar[type[HeadwayError]]
    """Type of the error for a process that is gone or does not answer."""

    def __init__(self, handle: Any, answer_seconds: float = ANSWER_SECONDS, epoch: int = 0) -> None:
        self.handle = handle
        """Handle of the process in Ray; None while there is none."""
        self.epoch = epoch
        """Epoch of the learner that uses this client; calls of earlier ones are refused."""
        self._answer_seconds = answer_seconds

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.handle, self._answer_seconds, self.epoch)

    def of_epoch(self, epoch: int) -> Self:
        """Return the client of a learner that was made again."""
        client = copy.copy(self)
        client.epoch = epoch
        return client

    async def call(self, method: str, *arguments: Any, wait: float = 0.0, **options: Any) -> Any:
        """Return the answer of a method, which may wait for `wait` seconds before it answers."""
        send = lambda: getattr(self.handle, method).remote(*arguments, **options)  # noqa: E731
        return await self.repeat(method, send, wait)

    async def repeat(self, method: str, send: Callable[[], Awaitable[T]], wait: float = 0.0) -> T:
        """Send a call until it is answered; see `call`."""
        longest, waited = wait + GIVE_UP_FACTOR * self._answer_seconds, 0.0
        while True:
            try:
                return await self._answer(method, send(), wait)
            except RayError as error:
                if isinstance(error, RayTaskError) or not await self.is_made_again(error):
                    raise await self.explained(error) from error
            except TimeoutError as error:
                waited += wait + self._answer_seconds
                if waited > longest:
                    raise self.unanswered(method, longest) from error
                log.warning("%s: the %s gave no answer; it is asked again", method, self.role)

    async def _answer(self, method: str, pending: Awaitable[T], wait: float) -> T:
        """Return or raise what a pending call does; TimeoutError if nothing tells why it waits."""
        call = asyncio.ensure_future(pending)
        try:
            while True:
                if (await asyncio.wait([call], timeout=wait + self._answer_seconds))[0]:
                    return call.result()
                if not await self.is_excused(method) and not call.done():
                    raise TimeoutError
        finally:
            call.cancel()

    async def is_made_again(self, error: RayError) -> bool:
        """Return True, after a moment, if a process takes the place of one that is gone."""
        await asyncio.sleep(REPEAT_SECONDS)
        return isinstance(error, ActorUnavailableError)  # until its supervisor ends it for good

    async def explained(self, error: RayError) -> Exception:
        """Return what a failed call raises."""
        return translated(error, f"the {self.role}'s process", self.lost)

    def unanswered(self, method: str, seconds: float) -> HeadwayError:
        """Return the error for a call without an answer."""
        return self.lost(f"{method}: the {self.role} did not answer within {seconds:g} s")

    async def is_excused(self, method: str) -> bool:
        """Return True if the process has a reason to answer this call late, which is waited for."""
        return False

    async def start(self, *, again: bool = False) -> None:
        """Wait until the process works, for the first time or `again`.

        Raises:
            TimeoutError: It takes longer than START_SECONDS.
        """
        async with asyncio.timeout(START_SECONDS):
            await self.call("ping")

    async def live(self) -> None:
        """Wait for the death of the process; raise RayError then."""
        await self.handle.live.remote()

    async def ping(self) -> None:
        """Wait for an answer; raise RayError at once if the process is gone."""
        await self.handle.ping.remote()

    async def serve_metrics(self, access: MetricsAccess) -> str:
        """Have the process serve its metrics until it ends; return their host:port."""
        address: str = await self.handle.serve_metrics.remote(access)
        return address

    def stop(self, *, again: bool = False) -> None:
        """End the process for good, or so that Ray starts it `again`."""
        ray.kill(self.handle, no_restart=not again)


def remote(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    *,
    wait: Callable[P, float] | None = None,
    fenced: bool = False,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make the client's method for a method of the process, with the same static type.

    `wait` returns the seconds that the method may wait, given its arguments. A `fenced` method gets
    the client's `epoch`, a keyword.
    """

    @functools.wraps(method)
    async def call(client: RayService, /, *arguments: P.args, **options: P.kwargs) -> T:
        seconds = 0.0 if wait is None else wait(*arguments, **options)
        epoch = {"epoch": client.epoch} if fenced and client.epoch else {}
        name = method.__name__
        answer: T = await client.call(name, *arguments, wait=seconds, **options, **epoch)
        return answer

    return call


class ServiceProcess:
    """Base of the class of a process that a `RayService` calls."""

    async def ping(self) -> None:
        """Answer at once."""

    async def live(self) -> None:
        """Never return: the call fails when the process dies."""
        await asyncio.Event().wait()

    async def serve_metrics(self, access: MetricsAccess) -> str:
        """Serve the memory and CPU time of the process until it ends; return host:port."""
        return serve_metrics([], access)
