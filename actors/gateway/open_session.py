"""An open session of the gateway: who may ask, how often, and what came of it."""

import asyncio
import logging
import secrets
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from actors.gateway.requests import Refused
from actors.gateway.session import Request, Session
from headway import clock
from headway.errors import HeadwayError
from queues.records import Turn

OnTurn = Callable[[Turn], Awaitable[None]]
FEWEST_AT_ONCE = 16
"""Least number of requests that a session may have at once, where it has fewer turns."""
WHOLE_BODIES = 4
"""Requests at once whose bodies may be of full length; each of more may have its share of that."""
STOPPED = "the policy has stopped; the cause is in the log of the actor"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session; a request beyond one of them is refused."""

    turns: int
    tokens: int
    """Sampled tokens of all answers; those that are sampled beside each other share them."""
    seconds: float
    """Time from its opening; past it requests that run are broken off."""
    temperature: float | None = None
    """None samples at the recipe's."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenSession:
    """A session whose requests the gateway serves, until it is closed."""

    session: Session
    limits: SessionLimits
    on_turn: OnTurn
    """Awaited with each turn before the last part of its answer goes out, recorded ones included.
    """
    address: str
    """Address of the gateway, for clients that send the key themselves."""
    forget: Callable[[], Any]
    """Takes the key away from the gateway."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    failure: BaseException | None = None
    """First error that was neither the client's nor a limit: of the engine, or of `on_turn`."""
    interrupted: bool = False
    """True once the engine ended a request since it was interrupted."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after a failure or an interruption: nothing more is served."""
    limit: str | None = None
    """The first limit that a request was refused by; None once an agent has gone on after it."""
    _is_final: bool = True
    """No answer follows once the limit is reached."""
    model_seconds: float = 0.0
    """Time in which at least one request waited for the policy."""
    running: set[asyncio.Task[None]] = field(default_factory=set)
    """All requests, from the end of their heads on."""
    asking: "set[Call]" = field(default_factory=set)
    """Requests that are sampled, or wait for tokens, and may become turns."""
    _shared: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, once tokens that a request had reserved are free."""
    _saving: dict[int, asyncio.Task[bool]] = field(default_factory=dict)
    """By number of the turn."""
    _context: Context = field(default_factory=copy_context)
    """That of the rollout, whose deadline is put off while a turn is saved."""
    _waiting: int = 0
    """Requests that wait for the policy."""
    _since: float = 0.0
    _opened: float = field(default_factory=clock.now)
    _closed: bool = False

    @property
    def base_url(self) -> str:
        """Base address for clients of OpenAI's API."""
        return f"{self.address}/v1"

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.limits.tokens - self.session.sampled

    @property
    def seconds_left(self) -> float:
        """Time until requests are broken off."""
        return self._opened + self.limits.seconds - clock.now()

    def check(self) -> None:
        """Raise Refused if nothing is served any more, or nothing more at once."""
        most = max(self.limits.turns, FEWEST_AT_ONCE)
        if self._closed:
            raise Refused(401, "the session of this key is closed")
        if self.stopped.is_set():
            raise Refused(503, STOPPED)
        if self.seconds_left <= 0:
            raise self.beyond(408, f"the session's {self.limits.seconds:g} s are over")
        if len(self.running) >= most:
            raise Refused(429, f"the session has {most} requests at once, the most; await one")

    async def admit(self, call: "Call", most: int) -> None:
        """Find the recorded answer to a request, or reserve a turn and up to `most` tokens for it.

        Waits while others have reserved all that are left; raises Refused beyond the limits.
        """
        call.turn = self.session.recorded(call.request)
        if call.turn is not None:
            return
        if self.session.turns + len(self.asking) >= self.limits.turns:
            raise self.beyond(429, f"the session has had its {self.limits.turns} turns")
        self.asking.add(call)
        while (left := self.tokens_left - sum(other.tokens for other in self.asking)) < 1:
            if self.tokens_left < 1:
                raise self.beyond(429, f"the session has sampled its {self.limits.tokens} tokens")
            await self._shared.wait()
        call.tokens = min(most, left)

    def release(self, call: "Call", kept: int = 0) -> None:
        """Let others have the tokens that a request had reserved, but for `kept` ones, if any."""
        if not kept:
            self.asking.discard(call)
        call.tokens = kept
        self._shared.set()
        self._shared = asyncio.Event()

    def beyond(self, status: int, limit: str, *, is_final: bool = True) -> Refused:
        """Note a limit, and return the error of a request beyond it."""
        if self.limit is None or not self._is_final:
            self.limit, self._is_final = limit, is_final
        return Refused(status, limit)

    def completed(self, call: "Call") -> None:
        """Take note that a request has become a turn of the session."""
        self.release(call)
        if not self._is_final:
            self.limit = None

    async def serve(
        self, call: "Call", answering: Callable[[float], Coroutine[Any, Any, None]]
    ) -> None:
        """Answer a request within the limits; raise Refused past the deadline or when closed.

        `answering` gets the share of the longest body that the request may have.
        """
        self.check()
        task = asyncio.create_task(answering(min(1.0, WHOLE_BODIES / (len(self.running) + 1))))
        self.running.add(task)
        try:
            while not task.done():
                left = None if self._saving else self.seconds_left
                if left is not None and left <= 0:
                    raise self.beyond(408, f"the session's {self.limits.seconds:g} s are over")
                await asyncio.wait(
                    {task, *self._saving.values()}, timeout=left, return_when=FIRST_COMPLETED
                )
            if task.cancelled():
                raise Refused(401, "the session of this key was closed")
            task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
            self.release(call)
            self.running.discard(task)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in which the policy is waited for."""
        self._since = self._since if self._waiting else clock.now()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.model_seconds += clock.now() - self._since

    async def save(self, turn: Turn) -> None:
        """Await `on_turn` to its end, even if the client leaves; raise HeadwayError if it fails.

        Its time counts against no deadline. A turn that is being saved is not saved twice.
        """
        saving = self._saving.get(turn.number)
        if saving is None:
            loop = asyncio.get_running_loop()
            saving = loop.create_task(self._save(turn), context=self._context.copy())
            self._saving[turn.number] = saving
            saving.add_done_callback(lambda _: self._saving.pop(turn.number))
        if not await asyncio.shield(saving):
            raise HeadwayError("the turn could not be saved")

    async def _save(self, turn: Turn) -> bool:
        began = clock.now()
        try:
            await self.on_turn(turn)
        except Exception as error:  # noqa: BLE001  (it is raised where the session ends)
            self.stop(error)
            return False
        self._opened += clock.now() - began
        return True

    def stop(self, failure: BaseException | None = None) -> None:
        """Serve nothing more after an error, or an interruption if there is none."""
        if failure is not None:
            log.warning("a session of the gateway has stopped: %s", failure)
        self.failure = self.failure or failure
        self.interrupted = self.interrupted or failure is None
        self.stopped.set()

    async def close(self) -> None:
        """Serve no further request, and break off those that run, but for turns being saved."""
        self._closed = True
        self.forget()
        for task in self.running:
            task.cancel()
        if ending := {*self.running, *self._saving.values()}:
            await asyncio.wait(ending)


@dataclass(slots=True, eq=False)
class Call:
    """One request while it is answered."""

    opened: OpenSession
    path: str
    request: Request = field(init=False)
    """Prompt of the session, once the messages are parsed."""
    turn: Turn | None = None
    """What is answered: a recorded turn, or a new one once it is complete."""
    tokens: int = 0
    """Most tokens that may be sampled, reserved while they are."""
    reader: Any = None
    """Reads the message of the answer as the client will."""
    refusal: Refused | None = None
    """Error that is answered in place of what the app makes of it."""
    outputs: AsyncGenerator[Any, None] | None = None
    """What the engine says."""
    task: asyncio.Task[Any] | None = None
    """Task that reads it, which vLLM cancels without waiting for its end, or forgets."""
    ended: bool = False

    def begin(self) -> None:
        """Note the task that asks the policy; raise CancelledError if the request has ended."""
        self.task = asyncio.current_task()
        if self.ended:
            raise asyncio.CancelledError

    def leave(self) -> None:
        """End a request whose client has left before the whole answer; the next like it has it."""
        self.ended = True
        if self.turn is not None:
            self.opened.session.lose(self.request, self.turn)

    async def end(self) -> None:
        """End what is left of the request, on the engine too."""
        self.ended = True
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
            await asyncio.wait({self.task})
        if self.outputs is not None:
            await self.outputs.aclose()


CALL: ContextVar[Call] = ContextVar("call")
"""The request that a task is answering."""
