"""The environment `tools`: as long as the policy calls tools it is given what they say.

    [actors]
    environment = "tools"
    environment_options = { tools = ["calculator", "my_module:lookup"] }

A message without a call is the answer, which the rewards of the recipe judge. A tool is a function
of texts or numbers, plain or a coroutine; one that raises is told to the policy, which may try
again. `python` runs programs that the policy writes, in the sandbox, and only where
actors.code_execution allows it. Limits on turns, tokens and time are those of `[actors]`.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actors.environments.protocol import Message, Turn
from actors.environments.single_turn import opening
from actors.environments.tool_calls import Call, Style, Unreadable, find_calls
from actors.errors import InputError
from actors.user_code.calls import call
from actors.user_code.dotted_path import load_dotted
from queues.records import Prompt

SHIPPED = ("calculator", "python")
TYPES = {
    int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
    NoneType: "null",
}  # fmt: skip
"""JSON's names of Python's types; everything else is a string."""


class ToolOptions(BaseModel):
    """The keys of actors.environment_options."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    tools: tuple[str, ...] = Field(default=("calculator",), min_length=1)
    """`calculator`, `python`, or dotted paths "module:function"."""
    style: Style = "json"
    """How calls are written: see `actors.environments.tool_calls`."""
    markers: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """What begins and what ends a call."""
    instruct: bool | None = None
    """Describe the tools in the system message; None: where the style is json."""
    reply_role: Literal["tool", "user"] = "tool"
    """Whose messages a chat template takes replies for; some know no tools."""
    reply_characters: int = Field(default=4000, ge=1)
    """What is beyond them is cut off from the reply of a tool."""
    error_reply: str | None = None
    """What the policy is told in place of what was wrong with a call; None tells it."""
    call_reward: float = 0.0
    """Of every turn that calls tools, all of them without an error."""
    python_seconds: float = Field(default=10.0, gt=0)
    """Limit of a program."""

    @model_validator(mode="after")
    def _plain_has_one_tool(self) -> Self:
        if not all(self.markers):
            raise ValueError(f"markers = {list(self.markers)} must both have a character")
        if self.style == "plain" and len(self.tools) != 1:
            raise ValueError(f'style = "plain" names no tool, so there is one, not {self.tools}')
        return self


class Tool(NamedTuple):
    """What a call may name."""

    function: Callable[..., Any]
    described: dict[str, Any]
    """As JSON schema; a call has no argument but those it names."""


class ToolBox:
    """Tools by name; the same for all conversations of an actor.

    Args:
        options: As `ToolOptions`.
        code_execution: Whether the policy's programs may be run.

    Raises:
        InputError: An option or tool that cannot be used, or no sandbox for `python`.
    """

    def __init__(self, options: dict[str, Any], code_execution: str = "off") -> None:
        try:
            self.options = ToolOptions(**options)
        except ValidationError as error:
            raise InputError(f"actors.environment_options of 'tools': {error}") from None
        self._tools: dict[str, Tool] = {}
        for path in self.options.tools:
            name, tool = _load(path, self.options, code_execution)
            if name in self._tools:
                raise InputError(f"actors.environment_options.tools: two are named {name!r}")
            self._tools[name] = tool

    def opening(self, prompt: Prompt) -> list[Message]:
        """The messages of a prompt, which say what tools there are where that is asked for."""
        messages = opening(prompt)
        told = self.options.instruct
        if not (self.options.style == "json" if told is None else told):
            return messages
        said = messages[0].content + "\n\n" if messages[0].role == "system" else ""
        rest = messages[1:] if said else messages
        return [Message("system", said + self._instruction()), *rest]

    async def reply(self, found: Call | Unreadable) -> tuple[str, bool]:
        """What the policy is told, and whether the call went well."""
        try:
            said = str(await self._run(found))
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  (told to the policy, which may try again)
            said, well = f"error: {error}", False
            if self.options.error_reply is not None:
                said = self.options.error_reply
        else:
            well = True
        return said[: self.options.reply_characters], well

    async def _run(self, found: Call | Unreadable) -> Any:
        if isinstance(found, Unreadable):
            raise ValueError(found.why)
        name = next(iter(self._tools)) if found.name is None else found.name
        if name not in self._tools:
            raise ValueError(f"no tool {name!r}; there are {', '.join(self._tools)}")
        tool = self._tools[name]
        if isinstance(found.arguments, str):
            return await call(tool.function, found.arguments)
        inspect.signature(tool.function).bind(**found.arguments)
        known = tool.described["function"]["parameters"]["properties"]
        if unknown := sorted(found.arguments.keys() - known.keys()):
            raise ValueError(
                f"{name} has no argument {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
            )
        return await call(partial(tool.function, **found.arguments))

    def _instruction(self) -> str:
        return instruction([tool.described for tool in self._tools.values()], self.options.markers)


class Tools:
    """One conversation with tools (an `Environment`)."""

    def __init__(self, box: ToolBox) -> None:
        self._box = box

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        return self._box.opening(prompt)

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`; tools are called one after the other, as written."""
        options = self._box.options
        calls = find_calls(message.content, options.style, options.markers)
        replies = [await self._box.reply(found) for found in calls]
        well = bool(replies) and all(good for _, good in replies)
        return Turn(
            [Message(options.reply_role, text) for text, _ in replies],
            options.call_reward if well else 0.0,
            done=not replies,
        )


def instruction(tools: Sequence[dict[str, Any]], markers: tuple[str, str]) -> str:
    """What tells of tools, as JSON schemas, in the words of Hermes' and Qwen's chat templates."""
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
    function = _function(path, options, code_execution)
    try:
        return name, Tool(function, _describe(name, function))
    except Exception as error:
        raise InputError(
            f"actors.environment_options.tools: {path!r} cannot be described to the policy: {error}"
        ) from error


def _function(path: str, options: ToolOptions, code_execution: str) -> Callable[..., Any]:
    if path == "calculator":
        from actors.environments.calculator import calculator

        return calculator
    if path == "python":
        from actors.environments.python_tool import python_tool
        from actors.sandbox import check_sandbox

        if code_execution == "off":
            raise InputError(
                'actors.environment_options.tools: "python" runs programs that the model writes, '
                'which is off; set actors.code_execution = "sandbox" to allow it'
            )
        check_sandbox()
        return python_tool(options.python_seconds)
    found = load_dotted(path, setting="actors.environment_options.tools", known=SHIPPED)
    if not callable(found):
        raise InputError(
            f"actors.environment_options.tools: {path!r} is a {type(found).__name__}, not a "
            "function"
        )
    return found  # type: ignore[no-any-return]


def _describe(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """A tool as JSON schema, from its signature and the first line of its docstring.

    Raises:
        Exception: It has no signature, or annotations that cannot be evaluated.
    """
    function = tool.func if isinstance(tool, partial) else tool
    bound = tool.keywords if isinstance(tool, partial) else {}
    parameters = {
        n: p
        for n, p in inspect.signature(function, eval_str=True).parameters.items()
        if n not in bound and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": (inspect.getdoc(function) or "").partition("\n")[0],
            "parameters": {
                "type": "object",
                "properties": {n: _schema(p.annotation) for n, p in parameters.items()},
                "required": [n for n, p in parameters.items() if p.default is p.empty],
            },
        },
    }


def _schema(annotation: Any) -> dict[str, Any]:
    """A type of Python's as JSON schema."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each) for each in arguments]}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    return {"type": TYPES.get(origin or annotation, "string")}
