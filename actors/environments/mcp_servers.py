"""Servers of the Model Context Protocol, whose tools the policy may call.

One connection serves all conversations of this process, in an event loop of its own; after its end
the next call makes another. A call that never reached the server raises ServiceAway, and is
repeated; one that the server has got is not, whatever became of it.
"""

import asyncio
import functools
import json
import os
import shlex
import shutil
import string
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import Field, model_validator

from actors.errors import ServiceAway
from headway.clean_text import register
from headway.errors import InputError, first_line
from headway.recipe_section import Section

START_SECONDS = 60.0
"""Longest that a server may take to start, and to list its tools."""
CONNECT_SECONDS = 10.0
NOT_DELIVERED = -31_999
"""Code of an error of ours, beside those of JSON-RPC: the request never reached the server."""
LOST_SESSION = "the server does not know the session any more"
ENDS_WITH_PARENT = (
    f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'sandbox')!r}); "
    "import linux; linux.end_with_parent(); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Program that becomes the one of its arguments, and is killed with the process that started it."""


class ServerOptions(Section):
    """A server of actors.environment_options.mcp: a program that is started, or an address."""

    command: str = ""
    """Program and arguments, as in a shell; it is spoken to through its input and output."""
    environment: tuple[str, ...] = ()
    """Variables that the program gets besides HOME, PATH, SHELL, TERM and the user's name."""
    url: str = Field(default="", pattern="^(https?://.+)?$")
    """Address of a running server (streamable HTTP)."""
    headers: dict[str, str] = Field(default={})
    """Headers of requests to it; `${NAME}` in a value is a variable of the environment."""
    seconds: float = Field(default=60.0, gt=0)
    """Time limit of a call."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        shlex.split(self.command)  # raises ValueError for a quotation that does not end
        if bool(self.command) == bool(self.url):
            raise ValueError("a server has either a command or a url")
        if (self.headers and self.command) or (self.environment and self.url):
            raise ValueError("headers belong to a url, and environment to a command")
        return self


class McpServer:
    """A server, connected when it is first needed; raises InputError for a missing program."""

    def __init__(self, setting: str, options: ServerOptions) -> None:
        self._setting, self._options = setting, options
        self._words = shlex.split(options.command)
        if self._words and shutil.which(self._words[0]) is None:
            raise InputError(f"{setting}.command: there is no program {self._words[0]!r}")
        headers = {name: string.Template(value) for name, value in options.headers.items()}
        names = {*options.environment, *(n for h in headers.values() for n in h.get_identifiers())}
        register(names)
        if missing := sorted(names - os.environ.keys()):
            raise InputError(f"{setting}: there is no variable {', '.join(missing)}")
        self._variables = {name: os.environ[name] for name in options.environment}
        self._headers = {name: value.safe_substitute(os.environ) for name, value in headers.items()}
        self._connecting, self._ended = asyncio.Lock(), asyncio.Event()
        self._ended.set()

    @functools.cached_property
    def tools(self) -> list[types.Tool]:
        """The tools of the server; blocks until it lists them.

        Raises InputError if it does not start, or lists none.
        """
        try:
            tools = _begin(asyncio.wait_for(self._listed(), START_SECONDS)).result()
        except Exception as error:
            late = f"no answer within {START_SECONDS:g} s"
            problem = late if isinstance(error, TimeoutError) else first_line(error)
            raise InputError(f"{self._setting} does not list its tools: {problem}") from error
        if not tools:
            raise InputError(f"{self._setting} has no tools")
        return [*tools]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool answers, as text.

        Raises ServiceAway if the call has not reached the server, and ValueError, with a text for
        the policy, if it has and there is no result.
        """
        result: types.CallToolResult = await asyncio.wrap_future(
            _begin(self._call(tool, arguments))
        )
        text = "\n".join(map(_as_text, result.content))
        if result.is_error:
            raise ValueError(text)
        structured = result.structured_content
        return json.dumps(structured) if structured is not None and not text else text

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        try:
            client, ended = await self._connected()
        except Exception as error:
            raise ServiceAway(f"{self._setting}: {first_line(error)}") from error
        seconds = self._options.seconds
        try:
            return await client.call_tool(tool, {**arguments}, read_timeout_seconds=seconds)
        except MCPError as error:
            if error.code == NOT_DELIVERED:
                if error.message == LOST_SESSION:
                    ended.set()
                raise ServiceAway(f"{self._setting}: {error.message}") from None
            problem = {
                types.REQUEST_TIMEOUT: f"no answer within {seconds:g} s",
                types.CONNECTION_CLOSED: "the tool's server ended before it answered",
            }.get(error.code, error.message)
            raise ValueError(problem) from None

    async def _listed(self) -> list[types.Tool]:
        client, ended = await self._connected()
        try:
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            return tools
        finally:
            ended.set()  # a process that only checks a recipe makes no call

    async def _connected(self) -> tuple[Client, asyncio.Event]:
        """Return a client, and what is set at its end; raise what prevents a connection."""
        async with self._connecting, asyncio.timeout(START_SECONDS):
            if self._ended.is_set():
                connected: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._serving = asyncio.create_task(
                    self._serve(connected, ended := asyncio.Event())
                )
                try:
                    self._client, self._ended = await connected, ended
                except asyncio.CancelledError:
                    self._serving.cancel()
                    raise
            return self._client, self._ended

    async def _serve(self, connected: "asyncio.Future[Client]", ended: asyncio.Event) -> None:
        """Hold a connection open until its end, all in one task, as the library wants it."""
        try:
            async with Client(self._transport(ended)) as client:
                connected.set_result(client)
                await ended.wait()
        except Exception as error:  # noqa: BLE001  (raised in the caller, if one waits)
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not connected.done():
                connected.set_exception(error)
        finally:
            ended.set()

    @asynccontextmanager
    async def _transport(self, ended: asyncio.Event) -> AsyncIterator[Any]:
        """Connect, and set `ended` when a program has closed its output."""
        if self._options.url:
            timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)
            http = httpx2.AsyncClient(headers=self._headers, transport=_Delivery(), timeout=timeout)
            async with http, streamable_http_client(self._options.url, http_client=http) as streams:
                yield streams
            return
        arguments = ["-I", "-S", "-c", ENDS_WITH_PARENT, *self._words]
        program = StdioServerParameters(command=sys.executable, args=arguments, env=self._variables)
        async with stdio_client(program) as (read, write), anyio.create_task_group() as tasks:
            passed_on, messages = anyio.create_memory_object_stream[Any](0)

            async def pass_on() -> None:
                async with passed_on:
                    async for message in read:
                        await passed_on.send(message)
                ended.set()

            tasks.start_soon(pass_on)
            yield messages, write
            tasks.cancel_scope.cancel()


class _Delivery(httpx2.AsyncHTTPTransport):
    """Answers requests that never reach the server itself, so that the connection outlives them."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        code = NOT_DELIVERED
        try:
            response = await super().handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            problem = f"{type(error).__name__}: {error}"
        except httpx2.TransportError:
            code, problem = types.CONNECTION_CLOSED, ""
        else:
            lost = response.status_code == 404 and "mcp-session-id" in request.headers
            if not lost and response.status_code not in (429, 503):
                return response
            await response.aclose()
            problem = LOST_SESSION if lost else f"status {response.status_code}"
        answer = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": problem}}
        return httpx2.Response(503, json=answer, request=request)


def _as_text(part: types.ContentBlock) -> str:
    """Return a part of a result; one that is no text is described in words."""
    held = part.resource if isinstance(part, types.EmbeddedResource) else part
    if isinstance(held, types.TextContent | types.TextResourceContents):
        return held.text
    return f"[{part.type} of type {held.mime_type or 'unknown'}, which cannot be shown]"


@functools.cache
def mcp_server(name: str, options: str) -> McpServer:
    """Return the one connection of this process to a server; `options` are JSON."""
    setting = f"actors.environment_options.mcp.{name}"
    return McpServer(setting, ServerOptions.model_validate_json(options))


def _begin(work: Coroutine[Any, Any, Any]) -> Any:
    """Begin work in the event loop of all servers; return its concurrent future."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp-servers", daemon=True).start()
    return loop
