"""The relay between actors and agents on other machines: one HTTP address for both (ASGI).

    actor ── POST /offers ─▶ relay ◀─ POST /tasks ─── agent     fetches a task, with the agents' key
          ◀─ its result, or    │ ▲
             that it is silent │ ├── POST … /v1/… ───           asks the policy, with the task's key
    gateway of the actor ◀─────┘ └── POST /result ───           reports, with the same

Requests go to the gateway of the actor that has the rollout at the time; while none has, they wait.
They wait for its answer while the actor calls, so that a frozen one holds nobody.
Errors have the form of the API that was asked.
"""

import asyncio
import json
from collections.abc import Coroutine
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from actors.gateway.http_server import (
    Answer,
    Disconnected,
    Event,
    Receive,
    Send,
    key_and_path,
    read_body,
)
from actors.gateway.requests import SERVED, Refused, api_of
from actors.remote.task_board import Task, TaskBoard
from actors.remote.task_keys import TaskKeys, same_key

T = TypeVar("T")
POLL_SECONDS = 5.0
"""Longest that a call of an actor waits; it is the actor's sign of life."""
LONGEST_POLL = 60.0
"""Longest that an agent may wait for a task in one request."""
WAITING_SECONDS = 300.0
"""Longest that a request waits for an actor that has the rollout."""
PASSED_ON = (b"accept", b"anthropic-beta", b"anthropic-version", b"content-type")
"""Headers of an agent's request that the gateway gets."""
MOVED = 409
"""Status of the answer to an actor that no longer has the rollout."""
UNREACHED = (401, 503)
"""Statuses of a gateway that does not know the session any more, or whose engine is gone."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Offer(_Body):
    """A rollout that waits for an agent, as its actor describes it."""

    id: str
    task: dict[str, Any]
    """Its prompt, for the agent."""
    address: str
    """Address of the gateway."""
    key: str
    """Key of its session there."""
    turns: int
    """Turns of earlier attempts that the session knows."""
    take: int = 0
    """Number of the agent that has it, as the relay answered last."""


class Fetch(_Body):
    """The request of an agent for a task."""

    seconds: Annotated[float, Field(ge=0, le=LONGEST_POLL)] = 30.0
    """Longest wait for one."""


class Report(_Body):
    """The result of an agent, one of these; with none the policy's last message is scored."""

    reward: FiniteFloat | dict[str, FiniteFloat] | None = None
    text: str | None = None
    """A text for the recipe's rewards."""
    error: str | None = None
    """How the agent has failed, so that the rollout fails too."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if len(self.model_fields_set) > 1:
            raise ValueError("give one of reward, text and error")
        return self


Body = TypeVar("Body", bound=_Body)


class _Request(NamedTuple):
    scope: Event
    holder: tuple[str, int]
    """Task and take that its key names; ("", 0) for a key of the run."""
    path: str
    body: bytes


class TaskRelay:
    """The application; `waiting_seconds` limits how long a request waits for an actor."""

    def __init__(
        self, board: TaskBoard, keys: TaskKeys, *, waiting_seconds: float = WAITING_SECONDS
    ) -> None:
        self._board, self._keys, self._waiting_seconds = board, keys, waiting_seconds
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(10.0, read=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Answer one request, by an error at worst."""
        if scope["type"] != "http":
            return
        key, path = key_and_path(scope)
        answer = Answer(send, api_of(path))
        try:
            holder = self._checked(key.decode(errors="replace"), path)
            request = _Request(scope, holder, path, await read_body(receive))
            await _until(_disconnected(receive), self._answer(request, send))
        except Refused as refused:
            await answer.refuse(refused)
        except (Disconnected, httpx.TransportError):
            return  # an answer that has begun is broken off

    async def close(self) -> None:
        """Close the connections to gateways."""
        await self._client.aclose()

    def _checked(self, key: str, path: str) -> tuple[str, int]:
        """Return the task and take that a key names; raise Refused if it is not the address's."""
        right = {"/offers": self._keys.of_actors, "/tasks": self._keys.of_agents}.get(path)
        if right is not None:
            if not same_key(key, right):
                raise Refused(401, "the key is not the one of this run")
            return "", 0
        holder = self._keys.read(key)
        if holder is None:
            raise Refused(401, "the key belongs to no task; give the one that came with it")
        return holder

    async def _answer(self, request: _Request, send: Send) -> None:
        if request.path in SERVED:
            await self._forward(request, send)
            return
        routes = {"/offers": self._offer, "/tasks": self._fetch, "/result": self._report}
        if request.path not in routes:
            known = ", ".join([*routes, *SERVED])
            raise Refused(404, f"{request.path[:100]} is not served; {known} are")
        if request.scope["method"] != "POST":
            raise Refused(405, f"{request.path} takes POST, found {request.scope['method']}")
        content = json.dumps(await routes[request.path](request)).encode()
        await _begin(send, 200, b"application/json")
        await send({"type": "http.response.body", "body": content})

    async def _offer(self, request: _Request) -> dict[str, Any]:
        """Let an actor wait for the result of a rollout, or the silence of its agent."""
        offer, board = _parsed(Offer, request.body), self._board
        client, _ = request.scope["client"]
        address = offer.address.replace("//0.0.0.0", f"//{client}")  # of a gateway on all of them
        offered = Task(
            id=offer.id, text=offer.task, address=address, key=offer.key, take=offer.take
        )
        task = board.offer(offered, offer.turns)
        await board.until(lambda: task.result is not None or task.key != offer.key, POLL_SECONDS)
        if task.key != offer.key:
            raise Refused(MOVED, "another session has taken the place of this one")
        left = board.is_left(task)
        return {"take": task.take, "left": left, "result": task.result}

    async def _fetch(self, request: _Request) -> dict[str, Any]:
        """Give a task to an agent, with the address and the key to go on with."""
        seconds = _parsed(Fetch, request.body).seconds
        task = await self._board.until(self._board.claim, seconds)
        if task is None:
            return {"task": None}
        headers = dict(request.scope["headers"])
        names = (b"x-forwarded-proto", b"host")
        scheme, host = (headers.get(name, b"").decode(errors="replace") for name in names)
        return {
            "task": task.text,
            "base_url": f"{scheme or 'http'}://{host}/v1",
            "key": self._keys.of_session(task.id, task.take),
        }

    async def _report(self, request: _Request) -> dict[str, Any]:
        result = _parsed(Report, request.body).model_dump(exclude_unset=True)
        self._board.report(await self._held(request.holder), result)
        return {"accepted": True}

    async def _held(self, holder: tuple[str, int]) -> Task:
        """Return the task of an agent once an actor has a session for it; Refused if none comes."""
        task = await self._board.until(lambda: self._board.find(*holder), self._waiting_seconds)
        if task is None:
            seconds = f"{self._waiting_seconds:g} s"
            raise Refused(503, f"no actor has had the task for {seconds}: it may have ended")
        return task

    async def _forward(self, request: _Request, send: Send) -> None:
        """Pass a request on to the actor that has the rollout, and to the next if that is gone."""
        headers = [header for header in request.scope["headers"] if header[0] in PASSED_ON]
        while True:
            task = await self._held(request.holder)
            session, address = task.key, task.address
            given = [*headers, (b"authorization", f"Bearer {session}".encode())]
            passed_on = self._client.build_request(
                request.scope["method"], f"{address}{request.path}", headers=given,
                content=request.body,
            )  # fmt: skip
            with self._board.hearing(task):
                frozen = self._board.frozen
                try:
                    sending = self._client.send(passed_on, stream=True)
                    response = await _until(frozen(task), sending)
                except httpx.TransportError:
                    self._board.lose(task, session)
                    continue
                try:
                    if response.status_code not in UNREACHED:
                        await _until(frozen(task), _pass_back(response, send))
                        return
                    self._board.lose(task, session)
                finally:
                    await response.aclose()


def _parsed(kind: type[Body], body: bytes) -> Body:
    """Read the body of a request; an empty one has no fields."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the body"
        known = ", ".join(kind.model_fields)
        raise Refused(400, f"{where}: {problem['msg']}; its fields: {known}") from None


async def _begin(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _pass_back(response: httpx.Response, send: Send) -> None:
    """Send an answer of a gateway as it comes."""
    kind = response.headers.get("content-type", "application/json").encode()
    await _begin(send, response.status_code, kind)
    async for block in response.aiter_raw():
        await send({"type": "http.response.body", "body": block, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _until(end: Coroutine[Any, Any, None], doing: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns; break it off, and raise ReadTimeout, where `end` ends first.

    Both have ended when this returns.
    """
    tasks = asyncio.ensure_future(doing), asyncio.ensure_future(end)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise httpx.ReadTimeout("nobody is there any more")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
