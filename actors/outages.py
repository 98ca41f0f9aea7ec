"""Services that are away: the errors of user code that say so, and the wait until they answer.

    a call ─▶ its answer
       ▲  └─▶ its service is away ─▶ a growing pause ─┐
       └──────────────────────────────────────────────┘

A service is something that a reward, a tool or an environment asks: a judge, a sandbox host. One
that answers nobody for `actors.outage_seconds` ends the run. Where others are answered, a call that
fails again and again counts against its rollout: what was asked may be the cause.
"""

import asyncio
import errno
import logging
import math
import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from actors.errors import EnvironmentFailed, RolloutFailed, ServiceAway, ServiceLost
from headway import clock
from headway.user_code import call_name, describe_error, where_raised

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds of the first pause, which doubles with each, and of the longest."""
MOST_ALONE = 5
"""Failures of one call, while others are answered, after which it counts against its rollout."""
SHOWN_SECONDS = 3.0
"""Age from which an outage is reported."""
CONNECTIONS = frozenset(
    {
        "APIConnectionError", "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError",
        "ConnectError", "ConnectionError", "IncompleteRead", "MaxRetryError", "NetworkError",
        "NewConnectionError", "ProxyError", "RemoteProtocolError", "gaierror",
    }
)  # fmt: skip
"""Errors, of whatever library, that a lost connection raises."""
TIMEOUTS = frozenset({"Timeout", "TimeoutError", "TimeoutException"})
CLIENTS = frozenset({"aiohttp", "httpcore", "httpx", "redis", "requests", "urllib3"})
"""Libraries whose TIMEOUTS are those of a service; others may be those of a computation."""
UNREACHABLE = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}
)
NETWORK = (
    "/socket.py",
    "/ssl.py",
    "/http/client.py",
    "/asyncio/streams.py",
    "/aiohttp/",
    "/httpcore/",
)
"""Ends and parts of the names of files in which a thread or a task waits for the network."""


def is_transient(status: int) -> bool:
    """Return True for an HTTP status after which another attempt may succeed."""
    return status in (408, 409, 425, 429) or (500 <= status <= 599 and status not in (501, 505))


def seconds_asked(retry_after: Any) -> float:
    """Parse the header `Retry-After`, seconds or a date; what is neither counts as 0."""
    with suppress(ValueError, TypeError):
        seconds = float(retry_after)
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    with suppress(ValueError, TypeError):
        date = parsedate_to_datetime(retry_after)
        return max(0.0, date.timestamp() - clock.wall(clock.now()))
    return 0.0


def outage(error: BaseException) -> ServiceAway | None:
    """Describe an error of user code by which a service is away; None for any other error."""
    for cause in _causes(error):
        if isinstance(cause, ServiceAway):
            return ServiceAway(str(cause), retry_after=cause.retry_after)
        status, headers = _answer(cause)
        if is_transient(status) or (not status and _is_away(cause)):
            text = describe_error(error) + where_raised(error)
            pause = seconds_asked(headers and headers.get("Retry-After"))
            return ServiceAway(text, retry_after=pause)
    return None


def waits_on_network() -> bool:
    """Return True if a thread in which this task has called user code waits for the network."""
    name, running = call_name(), sys._current_frames()
    threads = [thread.ident for thread in threading.enumerate() if thread.name == name]
    return any(in_network(walk_stack(running[x])) for x in threads if x in running)


def in_network(stack: Iterable[tuple[FrameType, int]]) -> bool:
    """Return True if the frames of a thread, or of a traceback, wait for the network."""
    files = [frame.f_code.co_filename for frame, _ in stack]
    return any(part in file for file in files for part in NETWORK)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it followed from or holds, each once."""
    known, waiting = set(), [error]
    while waiting:
        error = waiting.pop(0)
        if id(error) not in known:
            known.add(id(error))
            yield error
            context = None if error.__suppress_context__ else error.__context__
            waiting += filter(None, (error.__cause__, context, *getattr(error, "exceptions", ())))


def _answer(error: BaseException) -> tuple[int, Any]:
    """Return status and headers of the HTTP answer that an error holds; 0 and None without any."""
    with suppress(Exception):  # attributes of user code
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
        for holder, name in ((response, "status_code"), (error, "status"), (error, "code")):
            if type(status := getattr(holder, name, None)) is int and 100 <= status <= 599:
                return status, headers
    return 0, None


def _is_away(error: BaseException) -> bool:
    for kind in type(error).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ in CONNECTIONS or (kind.__name__ in TIMEOUTS and library in CLIENTS):
            return True
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return True
    late = isinstance(error, TimeoutError | asyncio.CancelledError)
    return late and in_network(walk_tb(error.__traceback__))


class Outages:
    """The services that the rollouts of one actor wait for, each for `seconds` at most."""

    def __init__(
        self,
        seconds: float,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._seconds, self._sleep, self._now = seconds, sleep, now
        self._answered: dict[str, float] = {}
        """Epoch seconds at which what was answered last was asked, by who asked."""
        self._away: dict[str, tuple[float, str]] = {}
        """Epoch seconds of the first failure, and its error, by who asked."""

    def reports(self) -> list[tuple[str, str, float]]:
        """Return who waits, on what, and for how many seconds, of outages that last."""
        ages = [(who, cause, self._now() - since) for who, (since, cause) in self._away.items()]
        return [report for report in ages if report[2] > SHOWN_SECONDS]

    async def ask(
        self, who: str, call: Callable[[], Awaitable[T]], failed: type[RolloutFailed]
    ) -> T:
        """See the function `ask`."""
        first, last, tries, alone = math.inf, math.inf, 0, 0
        is_step = failed is EnvironmentFailed  # which may be answered without asking anybody
        while True:
            asked = self._now()
            try:
                answer = await call()
            except ServiceAway as error:
                now = self._now()
                since = first if is_step else last
                others_are_answered = self._answered.get(who, -math.inf) > since
                first, last, tries = min(first, now), now, tries + 1
                alone += others_are_answered and not (is_step or error.retry_after)
                is_over = now - first >= self._seconds
                if alone >= MOST_ALONE or (is_over and others_are_answered):
                    raise failed(f"{error}; others are answered, and this is not") from error
                if who not in self._away:
                    self._away[who] = now, str(error).partition("\n")[0]
                    log.warning("%s waits on a service that is away: %s", who, error)
                if is_over:
                    raise ServiceLost(
                        f"{who} has waited {now - first:.0f} s (actors.outage_seconds = "
                        f"{self._seconds:g}) on a service that is away; once it answers, "
                        f"`headway resume` goes on with the run: {error}"
                    ) from error
                await self._pause(tries, error.retry_after, first + self._seconds - now)
            else:
                self._answered[who] = max(asked, self._answered.get(who, asked))
                if (tries or not is_step) and (began := self._away.pop(who, None)):
                    log.warning("%s is answered again, after %.1f s", who, self._now() - began[0])
                return answer

    async def _pause(self, tries: int, asked: float, left: float) -> None:
        """Wait after so many failures, and move the deadlines of the rollout by that time."""
        pause = min(FIRST_PAUSE * 2.0 ** min(tries - 1, 9), LONGEST_PAUSE)
        pause = min(max(pause * random.uniform(0.5, 1.0), asked), left)
        for deadline in _asking.get(NOBODY).deadlines:
            if not deadline.expired():
                deadline.reschedule((deadline.when() or 0.0) + pause)
        await self._sleep(pause)


class _Asking(NamedTuple):
    """The rollout of a task: where it waits for services, and its deadlines."""

    outages: Outages | None = None
    deadlines: tuple[asyncio.Timeout, ...] = ()


NOBODY = _Asking()
_asking: ContextVar[_Asking] = ContextVar("_asking")


@asynccontextmanager
async def timeout(seconds: float, outages: Outages | None = None) -> AsyncIterator[asyncio.Timeout]:
    """Set a deadline, against which waits for services do not count.

    With `outages`, it is that of a rollout, whose calls in the block wait for services.
    """
    asking = _asking.get(NOBODY)
    async with asyncio.timeout(seconds) as deadline:
        deadlines = (*asking.deadlines, deadline)
        token = _asking.set(_Asking(outages or asking.outages, deadlines))
        try:
            yield deadline
        finally:
            _asking.reset(token)


async def untimed(pending: Awaitable[T]) -> T:
    """Return what is awaited, such as a write; its time counts against no deadline of a rollout."""
    now = asyncio.get_running_loop().time
    left = [
        (deadline, when - now())
        for deadline in _asking.get(NOBODY).deadlines
        if (when := deadline.when()) is not None and not deadline.expired()
    ]
    for deadline, _ in left:
        deadline.reschedule(None)
    try:
        return await pending
    finally:
        for deadline, seconds in left:
            deadline.reschedule(now() + seconds)


async def ask(who: str, call: Callable[[], Awaitable[T]], failed: type[RolloutFailed]) -> T:
    """Return the answer of a call, which is repeated while it raises ServiceAway.

    `who` names the reward, tool or environment that asks, and is the same for every rollout. Raises
    `failed` if others are answered and this call is not, ServiceLost if nobody is, and what `call`
    raises outside of rollouts.
    """
    outages = _asking.get(NOBODY).outages
    return await (call() if outages is None else outages.ask(who, call, failed))
