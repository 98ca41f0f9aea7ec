"""The HTTP server of the gateway: who asks, what is served, and in which limits.

    client ─▶ uvicorn ─▶ Gateway ─▶ key → OpenSession ─▶ limits ─▶ app (vLLM's) ─▶ engine
                            └─ errors in the form of the API that was asked

The app sees a request without its headers and its key, and finds the session in `CALL`.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable

from actors.config import GatewayConfig
from actors.gateway.http_server import (
    FAILED,
    LEFT,
    Answer,
    App,
    Disconnected,
    Event,
    HttpServer,
    Receive,
    Send,
    key_and_path,
    read_body,
)
from actors.gateway.open_session import CALL, Call, OnTurn, OpenSession, SessionLimits
from actors.gateway.requests import SERVED, Refused, api_of, passed_on
from actors.gateway.session import Session

log = logging.getLogger(__name__)


class Gateway:
    """Serves the policy of one engine to agents, each in a session of its own.

    `make_app` makes the ASGI application that answers requests, once the engine runs.
    """

    def __init__(self, config: GatewayConfig, make_app: Callable[[], Awaitable[App]]) -> None:
        self._server, self._make_app = HttpServer(self, config.host), make_app
        self._sessions: dict[bytes, OpenSession] = {}
        """By their keys."""
        self._app: App | None = None

    async def start(self) -> None:
        """Serve from now on, on a free port; raises OSError where the host has no such address."""
        self._app = await self._make_app()
        await self._server.start()

    async def close(self) -> None:
        """Close every session and the server."""
        for opened in [*self._sessions.values()]:
            await opened.close()
        await self._server.close()

    @property
    def address(self) -> str:
        """Address of the server, once it has started."""
        return self._server.address

    def open(self, session: Session, limits: SessionLimits, on_turn: OnTurn) -> OpenSession:
        """Open a session under a new key; `on_turn` makes a turn durable."""
        opened = OpenSession(
            session=session, limits=limits, on_turn=on_turn, address=self.address,
            forget=lambda: self._sessions.pop(opened.key.encode(), None),
        )  # fmt: skip
        self._sessions[opened.key.encode()] = opened
        return opened

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Answer one request, by an error at worst (ASGI)."""
        if scope["type"] != "http":
            return
        key, path = key_and_path(scope)
        answer = Answer(send, api_of(path))
        try:
            opened = self._session(key)
            if SERVED.get(path) is None:
                raise Refused(404, f"{path[:100]} is not served; {', '.join(SERVED)} are")
            if SERVED[path] != scope["method"]:
                raise Refused(405, f"{path} takes {SERVED[path]}, found {scope['method']}")
            call = Call(opened, path)
            scope[LEFT] = call.leave
            await opened.serve(call, lambda share: self._asked(call, share, receive, answer))
        except Refused as refused:
            await answer.refuse(refused)
        except Disconnected:
            return

    def _session(self, key: bytes) -> OpenSession:
        """Return the session of a key; raise Refused if there is none."""
        if not key:
            raise Refused(401, "give the key of a session: Authorization: Bearer, or x-api-key")
        known = [name for name in self._sessions if secrets.compare_digest(name, key)]
        if not known:  # all were compared: time tells nothing of a key
            raise Refused(401, "the key belongs to no open session")
        return self._sessions[known[0]]

    async def _asked(self, call: Call, share: float, receive: Receive, answer: Answer) -> None:
        """Read a request, let the app answer it, and leave nothing of it behind."""
        assert self._app is not None
        body = await read_body(receive, share)
        body = passed_on(body) if SERVED[call.path] == "POST" else b""
        CALL.set(call)
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def request() -> Event:
            return given.pop() if given else await receive()

        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope: Event = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": SERVED[call.path], "path": call.path, "raw_path": call.path.encode(),
            "query_string": b"", "root_path": "", "headers": headers, "client": None,
            "server": None, "state": {},
        }  # fmt: skip
        try:
            await self._app(scope, request, answer.send)
            await answer.end(call.refusal)
        except Exception as error:
            if call.refusal is None:
                log.warning("the app failed a request", exc_info=error)
            await answer.refuse(call.refusal or Refused(500, FAILED))
        finally:
            await call.end()
