"""Plays environments of the library verifiers, up to 0.1: `environment = "verifiers:ID"`.

    reset ─▶ the library's own rollout begins in a task ─▶ it asks its client for a message
    step  ─▶ the client answers with the policy's        ─▶ it asks again, or ends ─▶ its rubric
                 (on the left the actor's event loop, on the right the library's, a thread's own)

Only the library's client, the connection to a model, is replaced by the policy. A conversation can
only grow: sampled tokens are never tokenised again. The rubric's reward belongs to the last turn;
a function of it that raises fails its rollout (the library counts 0). All conversations share one
event loop in a thread, so that blocking code delays others but never the engine.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any

from actors.environments.protocol import Message, Turn
from actors.environments.single_turn import opening
from actors.environments.tool_calls import Unreadable, find_calls
from actors.environments.tools import instruction, with_instruction
from actors.sandbox.guarded_parsing import guard_sympy
from headway.errors import InputError
from queues.records import Prompt

MARKERS = ("<tool_call>", "</tool_call>")
PREFIX = "verifiers:"
NO_SAMPLING = {"n": 1, "extra_body": {}}
"""Sampling arguments of an environment that brings none."""
ROW = "verifiers"
"""Key of the data set's row, without its prompt, in a prompt's metadata."""
_RAISED: ContextVar[list[tuple[str, Exception]]] = ContextVar("raised by a rubric")
"""Names and errors of the rubric's functions that raised in the rollout of this task."""


def load_verifiers(name: str, options: dict[str, Any], *, setting: str) -> Any:
    """Load an environment by its module ID, with - as _, and the options of its `load_environment`.

    Raises InputError if the library is missing or too new, or the environment cannot be played.
    """
    try:
        import verifiers
    except ImportError as error:
        raise InputError(
            f"{setting} = {name!r} needs the library verifiers, which cannot be imported "
            f"({error}); install it with: pip install 'verifiers<0.2'"
        ) from None
    if not hasattr(verifiers, "MultiTurnEnv"):
        raise InputError(
            f"{setting} = {name!r} needs the library verifiers before 0.2, and "
            f"{verifiers.__version__} is installed; install it with: pip install 'verifiers<0.2'"
        )
    guard_sympy()  # rubrics parse completions in this process
    try:
        environment = verifiers.load_environment(name.removeprefix(PREFIX), **options)
    except Exception as error:
        raise InputError(f"{setting} = {name!r} with options {options}: {error}") from error
    if not isinstance(environment, verifiers.MultiTurnEnv):
        raise InputError(
            f"{setting} = {name!r} is a {type(environment).__name__}, must be a SingleTurnEnv, a "
            "ToolEnv or another MultiTurnEnv"
        )
    if environment.requires_group_rollouts:
        raise InputError(f"{setting} = {name!r} scores whole groups, which cannot be played here")
    _refuse_sampling(environment, setting=f"{setting} = {name!r}")
    _keep_errors(environment.rubric)
    return environment


def _refuse_sampling(environment: Any, *, setting: str) -> None:
    """Refuse an environment, or a member of a group of them, that brings sampling arguments."""
    for member in (environment, *getattr(environment, "envs", ())):
        asked = {
            key: value
            for key, value in (getattr(member, "sampling_args", None) or {}).items()
            if (key, value) not in NO_SAMPLING.items()
        }
        if asked:
            raise InputError(
                f"{setting} brings sampling_args = {asked}, and rollouts are sampled as [actors] "
                "says: temperature, top_p, top_k, max_new_tokens; load it without them"
            )


def load_conversations(
    name: str, options: dict[str, Any], code_execution: str
) -> "Callable[[], VerifiersConversation]":
    """Return a function that makes conversations; arguments as `load_environment`."""
    return partial(
        VerifiersConversation, load_verifiers(name, options, setting="actors.environment")
    )


def _keep_errors(rubric: Any) -> None:
    """Wrap the functions of a rubric, or of a group of them, to record errors for `_play`."""
    rubric.funcs = [_keeping(function) for function in rubric.funcs]
    for member in getattr(rubric, "rubrics", ()):
        _keep_errors(member)


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(function, "_keeps_errors", False):
        return function
    name = getattr(function, "__name__", repr(function))

    @wraps(function)
    async def kept(*arguments: Any, **keywords: Any) -> float:
        try:
            value = function(*arguments, **keywords)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _RAISED.get([]).append((name, error))
            raise

    kept.__name__ = name
    kept._keeps_errors = True  # type: ignore[attr-defined]
    return kept


@cache
def library_loop() -> asyncio.AbstractEventLoop:
    """Start the event loop that all code of the library runs in, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


class VerifiersConversation:
    """One rollout of an environment of the library, which all share (an `Environment`)."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._client = _client()
        self._messages: list[dict[str, Any]] = []
        """All messages so far, the policy's included."""
        self.task: Future[Any] | None = None

    def __del__(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def reset(self, prompt: Prompt) -> list[Message]:
        row = prompt.metadata.get(ROW) or {"example_id": 0, "answer": prompt.answer or ""}
        first = [{"role": message.role, "content": message.content} for message in opening(prompt)]
        client = self._client  # not `self`: deleting this conversation has to cancel the task
        played = _play(self._environment, {**row, "prompt": first}, client)
        self.task = asyncio.run_coroutine_threadsafe(played, library_loop())
        self.task.add_done_callback(lambda _: _put(client.requests, False))
        if not await self._wants_message():
            raise ValueError("the environment ended before the first message of the policy")
        self._messages = _plain(self._client.prompt)
        messages = [_message(plain) for plain in self._messages]
        self._tools = bool(self._client.tools)
        if not self._tools:
            return messages
        fields = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {field: getattr(tool, field) for field in fields}}
            for tool in self._client.tools
        ]
        return with_instruction(messages, instruction(tools, MARKERS))

    async def step(self, message: Message) -> Turn:
        assert self.task is not None
        if self.task.done():
            error = self.task.exception() or self.task.result().get("error")
            limit = getattr(self._environment, "timeout_seconds", None)
            raise ValueError(
                "the environment ended while the policy spoke"
                + (f"; its own timeout_seconds is {limit:g}" if limit is not None else "")
                + (f"; then came {error!r}" if error is not None else "")
            ) from error
        answer = _assistant(message.content, calls=self._tools)
        self._messages += _plain([answer])
        _put(self._client.answers, answer)
        if not await self._wants_message():
            return Turn([], float(self._end()["reward"]), done=True)
        messages, known = _plain(self._client.prompt), len(self._messages)
        if messages[:known] != self._messages:
            raise ValueError(
                "the environment has rewritten the conversation; only conversations that keep "
                "earlier messages can be trained token by token"
            )
        self._messages = messages
        return Turn([_message(plain) for plain in messages[known:]], None, done=False)

    async def _wants_message(self) -> bool:
        """Return True once the environment wants a message, False at its end; raise its error."""
        assert self.task is not None
        request = asyncio.run_coroutine_threadsafe(self._client.requests.get(), library_loop())
        try:
            wants_message = await asyncio.wrap_future(request)
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        if not wants_message:
            self._end()
        return bool(wants_message)

    def _end(self) -> Any:
        """Return the state in which the environment ended, or raise its error."""
        assert self.task is not None
        state = self.task.result()
        if (error := state.get("error")) is not None:
            raise error
        return state


def _put(queue: asyncio.Queue[Any], item: Any) -> None:
    """Put an item into a queue of the library's event loop, from any thread."""
    library_loop().call_soon_threadsafe(queue.put_nowait, item)


async def _play(environment: Any, row: dict[str, Any], client: Any) -> Any:
    """Run and score a rollout of the library; raise ValueError if its rubric raised."""
    raised: list[tuple[str, Exception]] = []
    _RAISED.set(raised)
    state = None
    try:
        state = await environment.rollout(row, client, "policy", {})
        if state.get("error") is None:
            await environment.rubric.score_rollout(state)
    finally:
        state = client.state if state is None else state
        if state is not None:
            await environment.rubric.cleanup(state)
    if raised:
        name, error = raised[0]
        raise ValueError(f"{name} of the rubric raised {error!r}") from error
    return state


def _client() -> Any:
    """Return the client that stands for a model; its class derives from one of the library."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):
        """Passes the library's requests on to a `VerifiersConversation`, and its answers back."""

        def __init__(self) -> None:
            super().__init__(None)
            self.requests: asyncio.Queue[bool] = asyncio.Queue()
            """True when the environment wants a message, False when it has ended."""
            self.answers: asyncio.Queue[Any] = asyncio.Queue()
            self.state: Any = None
            """State of the rollout; None before the first request."""
            self.prompt: Sequence[Any] = ()
            self.tools: Sequence[Any] = ()

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **rest: Any
        ) -> Any:
            if sampling_args:
                raise ValueError(
                    f"the environment asks for a message with sampling_args = {sampling_args}; "
                    "rollouts are sampled as [actors] says"
                )
            self.prompt, self.tools, self.state = prompt, tools or (), rest.get("state")
            self.requests.put_nowait(True)
            message = await self.answers.get()
            return Response(
                id="headway",
                created=0,
                model=model,
                message=ResponseMessage(
                    **message.model_dump(), finish_reason="stop", is_truncated=False
                ),
            )

        def setup_client(self, config: Any) -> None:
            """There is none."""

        async def close(self) -> None:
            """Nothing is open."""

        async def _never(self, *arguments: Any, **keywords: Any) -> Any:
            raise NotImplementedError("there is no other client behind the policy")

        to_native_tool = to_native_prompt = get_native_response = _never
        raise_from_native_response = from_native_response = _never

    return Policy()


def _assistant(text: str, *, calls: bool) -> Any:
    """Convert a message of the policy, with its tool calls, to the library's type."""
    from verifiers.types import AssistantMessage, ToolCall

    written = [
        ("", call.why) if isinstance(call, Unreadable) else (call.name, json.dumps(call.arguments))
        for call in (find_calls(text, "json", MARKERS) if calls else [])
    ]
    if not written:
        return AssistantMessage(content=text)
    return AssistantMessage(
        content=text.partition(MARKERS[0])[0],
        tool_calls=[
            ToolCall(id=f"call_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(written)
        ],
    )


def _plain(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Reduce messages of the library to what is compared and shown of them."""
    return [
        {
            "role": message.role,
            "content": _text(message.content),
            "calls": [(c.name, c.arguments) for c in getattr(message, "tool_calls", None) or ()],
        }
        for message in messages
    ]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError(
            "the environment shows something other than text, which no policy here reads"
        )
    return "".join(part["text"] for part in parts)


def _message(plain: dict[str, Any]) -> Message:
    return Message(plain["role"], plain["content"])
