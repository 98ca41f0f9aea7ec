"""An HTTP server in the process, for ASGI applications that anyone may speak to.

Heads and bodies of requests have deadlines, bodies a longest size, and errors the form of the API
that was asked.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from actors.gateway.requests import Api, Refused, error_body

HEADER_SECONDS = 20.0
"""Deadline of the head of a request, and of a connection without one."""
BODY_SECONDS = 60.0
"""Deadline of the body of a request."""
BODY_BYTES = 16 << 20
"""Longest body of a request."""
LEFT = "left"
"""Key of what a scope may have to be called if its client leaves before the whole answer."""
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Event, Receive, Send], Awaitable[None]]
FAILED = "the request failed; its cause is in the log of the actor"

log = logging.getLogger(__name__)


class HttpServer:
    """Serves an application on an address of this machine; port 0 takes a free one."""

    def __init__(self, app: App, host: str, port: int = 0) -> None:
        self._app, self._host, self._port = app, host, port
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        """Address of the server, once it has started."""

    async def start(self) -> None:
        """Serve from now on; raises OSError where the machine has no such address or port."""
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        listening = socket.create_server((self._host, self._port), backlog=1024)
        self.address = f"http://{self._host}:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            self._app,
            http=punctual(AutoHTTPProtocol),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(HEADER_SECONDS),
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # signals are the process's own
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Take no more requests, and end those that run."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving


class Disconnected(Exception):
    """The client left before its request was whole."""


class Answer:
    """The answer to one request, whose errors have the form of the API."""

    def __init__(self, send: Send, api: Api) -> None:
        self._send, self._api = send, api
        self._begun = self._ended = False
        self._status = 0
        """Status of an error that the app answers."""
        self._error = bytearray()
        """Body of that error."""

    async def send(self, event: Event) -> None:
        """Pass on an event of the app; its errors are kept until `end`."""
        if self._ended:
            return
        if event["type"] == "http.response.start" and event["status"] >= 400:
            self._status = event["status"]
        elif self._status:
            self._error += event.get("body", b"")
        else:
            self._begun = True
            self._ended = event["type"] == "http.response.body" and not event.get("more_body")
            if self._ended:  # what ends an answer is sent once all before it is with the system
                await self._send({**event, "more_body": True})
                event = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._send(event)

    async def end(self, refusal: Refused | None) -> None:
        """Answer an error of the app, or the `refusal` in its place; causes go to the log."""
        if not self._status:
            return
        message, parameter = _described(bytes(self._error))
        if refusal is None and self._status >= 500:
            log.warning("the app failed a request with status %d: %s", self._status, message)
            message, parameter = FAILED, None
        await self.refuse(refusal or Refused(self._status, message, parameter))

    async def refuse(self, refused: Refused) -> None:
        """Answer an error, or end an answer that has begun by an event that tells it."""
        if self._ended:
            return
        body = error_body(self._api, refused)
        if self._begun:
            body = b"event: error\ndata: %b\n\n" % body
        else:
            await self._send(self._head(refused.status, len(body)))
        self._begun = self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    @staticmethod
    def _head(status: int, length: int) -> Event:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(length).encode()),
            (b"connection", b"close"),  # the rest of the request may never come
            (b"x-should-retry", b"false"),
        ]
        return {"type": "http.response.start", "status": status, "headers": headers}


def _described(body: bytes) -> tuple[str, str | None]:
    """Return message and parameter of an error of the app."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.decode(errors="replace")[:1000] or "the request failed", None


def key_and_path(scope: Event) -> tuple[bytes, str]:
    """Return the key of a request and the address that it asks for, without the key."""
    path: str = scope["path"]
    if path.startswith("/s/"):
        _, _, key, *rest = path.split("/", 3)
        return key.encode(errors="replace"), "/" + "".join(rest)
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip(), path
    return headers.get(b"x-api-key", b"").strip(), path


async def read_body(receive: Receive, share: float = 1.0) -> bytes:
    """Read the body of a request; raise Refused for one that is too long or too slow.

    It may have a `share` of BODY_BYTES.
    """
    body, length, more, most = bytearray(), 0, True, int(share * BODY_BYTES)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:  # to its end, as a client reads no answer before that
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise Disconnected
                part = event.get("body", b"")
                length += len(part)
                body += part if length <= most else b""
                more = event.get("more_body", False)
    except TimeoutError:
        raise Refused(408, f"the body was not whole within {BODY_SECONDS:g} s") from None
    if length > most:
        beside = " beside other requests" if share < 1 else ""
        raise Refused(413, f"the body has {length} bytes, may have {most}{beside}")
    return bytes(body)


def punctual(protocol: Any) -> Any:
    """Return uvicorn's protocol with a deadline for the head of a request.

    It also tells who leaves before an answer is whole (`LEFT`).
    """

    class Punctual(protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # a send waits until all before it is sent
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.cycle is not None and self.cycle.disconnected:
                self.cycle.scope.get(LEFT, bool)()
            if self._late is not None:
                self._late.cancel()

        def _watch(self) -> None:
            """Close the connection at the deadline unless a request is being answered."""
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering and self._late is not None:
                self._late.cancel()
                self._late = None
            elif not answering and self._late is None:
                self._late = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    return Punctual
