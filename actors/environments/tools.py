"""The environment `tools`: the policy may call tools until it answers without a call.

The policy is shown the error of a call and may try again.
"""

import inspect
import json
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Self, cast

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs

from actors.environments.protocol import Message, Recall, Turn
from actors.environments.single_turn import opening
from actors.environments.tool_calls import Call, Style, Unreadable, find_calls
from actors.errors import RolloutFailed, ServiceAway, ServiceLost
from actors.outages import ask, outage
from actors.sandbox.sandbox import Sandbox, check_code_execution
from actors.shipped import TOOLS
from headway.clean_text import without_known_secrets
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section
from headway.user_code import call, shown
from queues.records import Prompt

_CONCURRENT = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""Sandboxes that one actor runs at once; more would only share the same cores."""


class ToolOptions(Section):
    """The keys of actors.environment_options."""

    tools: tuple[str, ...] = ("calculator",)
    """`calculator`, `python`, or dotted paths "module:function"; none by default where there are
    servers."""
    mcp: dict[str, Any] = Field(default={})
    """Servers of the Model Context Protocol by name, whose tools are the policy's: tables of
    `actors.environments.mcp_servers.ServerOptions`."""
    style: Style = "json"
    """Format of calls: see `actors.environments.tool_calls`."""
    markers: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """Texts that begin and end a call."""
    instruct: bool | None = None
    """Describe the tools in the system message; None: only with style "json"."""
    reply_role: Literal["tool", "user"] = "tool"
    """Role of the replies; some chat templates have no role `tool`."""
    reply_characters: int = Field(default=4000, ge=1)
    """Characters after which the reply of a tool is cut off."""
    error_reply: str | None = None
    """Reply to every call that fails; None shows the policy the error."""
    call_reward: float = 0.0
    """Reward of a turn whose calls all succeed, at least one; others then earn 0. With 0 here no
    turn has a reward."""
    python_seconds: float = Field(default=10.0, gt=0)
    """Time limit of a program."""
    python_folders: tuple[str, ...] = ()
    """Folders of the machine that programs may read and import from."""

    @model_validator(mode="before")
    @classmethod
    def _servers_bring_tools(cls, options: Any) -> Any:
        return {"tools": (), **options} if options.get("mcp") else options

    @model_validator(mode="after")
    def _plain_has_one_tool(self) -> Self:
        if not (self.tools or self.mcp):
            raise ValueError("tools = [] leaves no tool; name one, or a server in mcp")
        if not all(self.markers):
            raise ValueError(f"markers = {list(self.markers)} must both have a character")
        if self.style == "plain" and (len(self.tools) != 1 or self.mcp):
            named = [*self.tools, *self.mcp]
            raise ValueError(f'style = "plain" names no tool, so there is one, not {named}')
        return self


class Tool(NamedTuple):
    """A function that calls may name."""

    description: dict[str, Any]
    """As JSON schema."""
    bind: Callable[[Any], Callable[[], Any]]
    """Returns the function with the arguments of a call, a dict or a text; raises ValueError, with
    a text for the policy, if they are not those of its parameters."""


async def made(index: int, call: Callable[[], Awaitable[Any]]) -> Any:
    """Make a call, where no results are recorded (a `Recall`)."""
    return await call()


class Tools:
    """The environment of every conversation of an actor (an `Environment`); it has no state."""

    def __init__(self, options: dict[str, Any], code_execution: str = "off") -> None:
        setting = "actors.environment_options of 'tools'"
        self._options = parse_options(ToolOptions, setting, options)
        self._tools: dict[str, Tool] = {}
        for path in self._options.tools:
            name, tool = _load(path, self._options, code_execution)
            if name in self._tools:
                raise InputError(f"actors.environment_options.tools: two are named {name!r}")
            self._tools[name] = tool
        if self._options.mcp:
            self._tools |= _of_servers(self._options.mcp, self._tools)

    def opening(self, prompt: Prompt) -> list[Message]:
        """Return the messages of a prompt, with a description of the tools where it is wanted."""
        messages = opening(prompt)
        instruct = self._options.instruct
        if not (self._options.style == "json" if instruct is None else instruct):
            return messages
        description = instruction(
            [tool.description for tool in self._tools.values()], self._options.markers
        )
        return with_instruction(messages, description)

    async def reset(self, prompt: Prompt) -> list[Message]:
        return self.opening(prompt)

    async def step(self, message: Message, recall: Recall = made) -> Turn:
        """See `Environment.step`; tools are called one after the other, as written.

        A call whose result is recorded is not made again (`recall`).
        """
        options = self._options
        calls = find_calls(message.content, options.style, options.markers)
        replies = [await recall(i, partial(self._reply, call)) for i, call in enumerate(calls)]
        succeeded = bool(replies) and all(success for _, success in replies)
        messages = [Message(options.reply_role, text) for text, _ in replies]
        reward = (options.call_reward if succeeded else 0.0) if options.call_reward else None
        return Turn(messages, reward, done=not replies)

    async def _reply(self, written: Call | Unreadable) -> tuple[str, bool]:
        """Run a call; return the reply, and True if it succeeded."""
        name = getattr(written, "name", None) or next(iter(self._tools))
        try:
            outcome = await ask(f"tool {name!r}", partial(self._run, written), RolloutFailed)
            text, succeeded = without_known_secrets(str(outcome)), True
        except (InputError, ServiceAway, ServiceLost):
            raise
        except Exception as error:  # noqa: BLE001  (shown to the policy, which may try again)
            text, succeeded = without_known_secrets(f"error: {_said(error)}"), False
            if self._options.error_reply is not None:
                text = self._options.error_reply
        return text[: self._options.reply_characters], succeeded

    async def _run(self, written: Call | Unreadable) -> Any:
        if isinstance(written, Unreadable):
            raise ValueError(written.why)
        name = next(iter(self._tools)) if written.name is None else written.name
        if name not in self._tools:
            raise ValueError(f"no tool {name!r}; there are {', '.join(self._tools)}")
        given = written.arguments
        return await _called(self._tools[name].bind(given), given)


async def _called(function: Callable[[], Any], given: Any) -> Any:
    """Return what a tool returns; ServiceAway if its service is away, but for an address given."""
    try:
        return await call(function)
    except Exception as error:
        away = outage(error)
        if away and (isinstance(error, ServiceAway) or "://" not in str(given)):
            raise away from error
        raise


def _problem(name: str, known: Iterable[str], error: ValidationError) -> str:
    """Say what is wrong with the arguments of a call, in one line for the policy."""
    problems = error.errors(include_url=False)
    problem = min(problems, key=lambda entry: not entry["type"].startswith("missing"))
    where = ".".join(map(str, problem["loc"]))
    if problem["type"].startswith("missing") and len(problem["loc"]) == 1:
        return f"missing a required argument: {where!r}"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{name} has no argument {where}; it has {', '.join(known) or 'none'}"
    return f"argument {where}: {problem['msg']}"


def _said(error: Exception) -> str:
    """Return the text of an error of a tool, whose `__str__` may fail."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (it is user code)
        return shown(error)


def load_tools(name: str, options: dict[str, Any], code_execution: str) -> Callable[[], Tools]:
    """Return a function that begins conversations with tools; arguments as `load_environment`."""
    tools = Tools(options, code_execution)
    return lambda: tools


def with_instruction(messages: list[Message], text: str) -> list[Message]:
    """Append a text to the system message; begin with one where there is none."""
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def instruction(tools: Sequence[dict[str, Any]], markers: tuple[str, str]) -> str:
    """Describe tools, given as JSON schemas, as the chat templates of Hermes and Qwen do."""
    begin, end = markers
    form = '{"name": <function-name>, "arguments": <args-json-object>}'
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou "
        "are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{listed}\n</tools>\n\nFor each function call, return a json object with function "
        f"name and arguments within {begin}{end} XML tags:\n{begin}\n{form}\n{end}"
    )


def _load(path: str, options: ToolOptions, code_execution: str) -> tuple[str, Tool]:
    name = path.rpartition(":")[2]
    function = TOOLS.load(path, setting="actors.environment_options.tools").function
    if path == "python":
        check_code_execution('actors.environment_options.tools: "python"', code_execution)
        function = partial(function, seconds=options.python_seconds, folders=options.python_folders)
    try:
        return name, _tool(name, function)
    except Exception as error:
        problem = _said(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise InputError(
            f"actors.environment_options.tools: {path!r} cannot be described to the policy: "
            f"{problem}; it needs parameters with types that JSON has"
        ) from error


class _PlainSchema(GenerateJsonSchema):
    """A JSON schema without a title for each parameter."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _tool(name: str, function: Callable[..., Any]) -> Tool:
    """Describe a tool by its signature and the first line of its docstring.

    What a `partial` has bound and `*args` are left out: no call may give them.
    """
    inner, fixed = function, {}
    if isinstance(function, partial):
        inner, fixed = function.func, function.keywords
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    known = [p for p in parameters if p.name not in fixed and p.kind != p.VAR_POSITIONAL]
    positional = [p.name for p in known if p.kind == p.POSITIONAL_ONLY]

    def bind(*given: Any, **named: Any) -> Callable[[], Any]:
        if lost := fixed.keys() & named.keys():  # of a function with **kwargs
            raise ValueError(f"{name} has no argument {', '.join(lost)}")
        return partial(function, *given, *(named.pop(n) for n in positional if n in named), **named)

    bind.__module__ = inner.__module__  # where texts in annotations are looked up
    bind.__annotations__ = {p.name: p.annotation for p in known if p.annotation is not p.empty}
    bind.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.name in positional else p for p in known]
    )
    binding: TypeAdapter[Any] = TypeAdapter(cast("Any", bind))
    schema = binding.json_schema(schema_generator=_PlainSchema)
    with suppress(RecursionError):  # a type that contains itself stays a reference
        schema = _inlined(schema, schema.get("$defs", {}))
    described = {
        "name": name,
        "description": (inspect.getdoc(inner) or "").partition("\n")[0],
        "parameters": schema,
    }

    def bound(given: Any) -> Callable[[], Any]:
        arguments = ArgsKwargs((given,)) if isinstance(given, str) else ArgsKwargs((), given)
        try:
            return cast("Callable[[], Any]", binding.validate_python(arguments))
        except ValidationError as error:
            raise ValueError(_problem(name, schema["properties"], error)) from None

    return Tool({"type": "function", "function": described}, bound)


def _of_servers(servers: Mapping[str, Any], own: Iterable[str]) -> dict[str, Tool]:
    """Return the tools of MCP servers; the server's name goes before one that is there twice."""
    from actors.environments.mcp_servers import ServerOptions, mcp_server

    setting, listed = "actors.environment_options.mcp", []
    for server_name, options in servers.items():
        if not isinstance(options, Mapping):
            raise InputError(f"{setting}.{server_name} = {options!r} must be a table")
        parsed = parse_options(ServerOptions, f"{setting}.{server_name}", options)
        server = mcp_server(server_name, parsed.model_dump_json())
        listed += [(server_name, server, tool) for tool in server.tools]
    names = Counter([*own, *(tool.name for _, _, tool in listed)])
    tools: dict[str, Tool] = {}
    for server_name, server, tool in listed:
        name = f"{server_name}_{tool.name}" if names[tool.name] > 1 else tool.name
        if name in tools or (name != tool.name and name in names):
            raise InputError(f"{setting}.{server_name}: two tools are named {name!r}")
        described = {
            "name": name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        bind = partial(partial, server.call, tool.name)
        tools[name] = Tool({"type": "function", "function": described}, bind)
    return tools


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a JSON schema with definitions in the place of references to them."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    referred = definitions.get(schema.get("$ref", "").rpartition("/")[2], {})
    return {
        key: _inlined(value, definitions)
        for key, value in {**referred, **schema}.items()
        if key not in ("$ref", "$defs")
    }


def python(program: str, *, seconds: float, folders: tuple[str, ...] = ()) -> str:
    """Run a program of Python's standard library; return its output, and its error if it failed.

    `seconds` is its time limit; it may import from `folders` too. Raises as `Sandbox.run`.
    """
    with _CONCURRENT:
        outcome = Sandbox(seconds=seconds, folders=folders).run(program)
    if (outcome.ended, outcome.code) == ("exit", 0):
        return outcome.stdout
    last_line = outcome.stderr.strip().rpartition("\n")[2]
    limits = {"timeout": f"stopped after {seconds:g} s", "output": "stopped: it printed too much"}
    return f"{outcome.stdout}error: {limits.get(outcome.ended) or last_line or outcome.ended}"
