"""Plays environments of the library verifiers, up to 0.1: `environment = "verifiers:ID"`.

    reset ─▶ the library's own rollout begins in a task ─▶ it asks its client for a message
    step  ─▶ the client answers with the policy's        ─▶ it asks again, or ends ─▶ its rubric
                 (on the left the actor's event loop, on the right the library's, a thread's own)

The client is the seam: the environment's set-up, stop conditions, tools, limits and clean-up run as
the library runs them, and what it would send to a model is what the policy is given next. A
conversation only grows: an environment that rewrites what was said before fails its rollout, since
what was sampled is never tokenised again. The rubric's reward is that of the last turn; what the
recipe's own rewards say is added. A function of the rubric that raises, which the library counts as
0, fails its rollout. Code of the library's that blocks holds up its other conversations, and never
the engine: all of them share one loop, as the library's clients and locks expect. A conversation
that is cut off by actors.max_turns or max_new_tokens before the environment ends it earns nothing
from the rubric. Leaves out rewards of whole groups, pictures, and what the library became with 0.2.
It is not installed with Headway.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

from actors.environments.protocol import Message, Turn
from actors.environments.single_turn import opening
from actors.environments.tool_calls import Unreadable, find_calls
from actors.environments.tools import instruction
from actors.errors import InputError
from queues.records import Prompt

MARKERS = ("<tool_call>", "</tool_call>")
PREFIX = "verifiers:"
ROW = "verifiers"
"""What a prompt's metadata has the row of the data set under, less its prompt."""
_RAISED: ContextVar[list[tuple[str, Exception]]] = ContextVar("raised by a rubric")
"""Functions of the rubric that raised in the rollout of this task."""


def load_verifiers(name: str, options: dict[str, Any], *, setting: str) -> Any:
    """The library's environment of this id.

    Args:
        name: "verifiers:ID"; a module of that name, with - as _, has `load_environment`.
        options: Its keywords.
        setting: Key of the recipe, or what takes the place of it, for the message.

    Raises:
        InputError: The library is not installed or another one, or it cannot load the environment.
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
    try:
        found = verifiers.load_environment(name.removeprefix(PREFIX), **options)
    except Exception as error:
        raise InputError(f"{setting} = {name!r} with options {options}: {error}") from error
    if not isinstance(found, verifiers.MultiTurnEnv):
        raise InputError(
            f"{setting} = {name!r} is a {type(found).__name__}, must be a SingleTurnEnv, a ToolEnv "
            "or another MultiTurnEnv"
        )
    if found.requires_group_rollouts:
        raise InputError(f"{setting} = {name!r} scores whole groups, which cannot be played here")
    _keep_errors(found.rubric)
    return found


def _keep_errors(rubric: Any) -> None:
    """Has the functions of a rubric, or of a group of them, tell `_play` what they raise."""
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
            found = function(*arguments, **keywords)
            return float(await found if inspect.isawaitable(found) else found)
        except Exception as error:
            _RAISED.get([]).append((name, error))
            raise

    kept.__name__ = name
    kept._keeps_errors = True  # type: ignore[attr-defined]
    return kept


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Where everything of the library runs, whatever blocks there."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


class Conversation:
    """One rollout of an environment of the library (an `Environment`).

    Args:
        environment: Of the library; the same for all conversations of an actor.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._client = _client()
        self._heard: list[dict[str, Any]] = []
        """All messages so far, the policy's included."""
        self._tools = False
        self._task: Future[Any] | None = None

    def __del__(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        row = prompt.metadata.get(ROW) or {"example_id": 0, "answer": prompt.answer or ""}
        said = [{"role": message.role, "content": message.content} for message in opening(prompt)]
        self._begin(_play(self._environment, {**row, "prompt": said}, self._client))
        if not await self._asks():
            raise ValueError("the environment ended before the policy said anything")
        self._heard = said = _said(self._client.prompt)
        messages = [_message(each) for each in said]
        if not self._client.tools:
            return messages
        self._tools = True
        described = instruction(
            [{"type": "function", "function": _described(tool)} for tool in self._client.tools],
            MARKERS,
        )
        first = messages[0]
        if first.role == "system":
            return [Message("system", f"{first.content}\n\n{described}"), *messages[1:]]
        return [Message("system", described), *messages]

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`."""
        assert self._task is not None
        if self._task.done():
            error = self._task.exception() or self._task.result().get("error")
            limit = getattr(self._environment, "timeout_seconds", None)
            raise ValueError(
                "the environment ended while the policy spoke"
                + (f"; its own timeout_seconds is {limit:g}" if limit is not None else "")
                + (f"; then came {error!r}" if error is not None else "")
            ) from error
        answer = _assistant(message.content, calls=self._tools)
        self._heard += _said([answer])
        self._client.answer(answer)
        if not await self._asks():
            return Turn([], float(self._end()["reward"]), done=True)
        said = _said(self._client.prompt)
        known = len(self._heard)
        if said[:known] != self._heard:
            raise ValueError(
                "the environment has rewritten the conversation; only ones that go on from what "
                "was said can be trained token by token"
            )
        self._heard = said
        return Turn([_message(each) for each in said[known:]], 0.0, done=False)

    def _begin(self, played: Coroutine[Any, Any, Any]) -> None:
        client = self._client  # not this conversation, whose end is to end what is played
        self._task = asyncio.run_coroutine_threadsafe(played, _loop())
        self._task.add_done_callback(lambda _: client.wake())

    async def _asks(self) -> bool:
        """Whether the environment wants another message; else it has ended, perhaps by an error."""
        assert self._task is not None
        try:
            if not self._task.done():
                await asyncio.wrap_future(self._client.turn)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if not self._task.done():
            return True
        self._end()
        return False

    def _end(self) -> Any:
        """The state in which the environment ended."""
        assert self._task is not None
        state = self._task.result()
        if (error := state.get("error")) is not None:
            raise error
        return state


async def _play(environment: Any, row: dict[str, Any], client: Any) -> Any:
    """A rollout of the library and its score; the state.

    Raises:
        ValueError: A function of the rubric raised, and which.
    """
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
    """What an environment takes for the address of a model.

    A class of the library's is wanted, which is imported only here.
    """
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):
        """Asks, and waits to be answered."""

        def __init__(self) -> None:
            super().__init__(None)
            self.turn: Future[None] = Future()
            """Done when the environment asks, or has ended."""
            self.state: Any = None
            """Of the rollout; None before it first asks."""
            self.prompt: Sequence[Any] = ()
            self.tools: Sequence[Any] = ()
            self._answered: asyncio.Future[Any] | None = None

        def wake(self) -> None:
            with suppress(InvalidStateError):  # it was asked before, or nobody waits any more
                self.turn.set_result(None)

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **rest: Any
        ) -> Any:
            self.prompt, self.tools, self.state = prompt, tools or (), rest.get("state")
            self._answered = asyncio.get_running_loop().create_future()
            self.wake()
            said = await self._answered
            return Response(
                id="headway",
                created=0,
                model=model,
                message=ResponseMessage(
                    **said.model_dump(), finish_reason="stop", is_truncated=False
                ),
            )

        def answer(self, message: Any) -> None:
            """The environment goes on with this message of the policy."""
            self.turn = Future()
            _loop().call_soon_threadsafe(self._settle, self._answered, message)

        def _settle(self, answered: asyncio.Future[Any] | None, message: Any) -> None:
            if (
                answered is not None and not answered.done()
            ):  # else it has stopped waiting meanwhile
                answered.set_result(message)

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
    """A message of the policy as the library has it, with the calls of tools that it holds."""
    from verifiers.types import AssistantMessage, ToolCall

    found = find_calls(text, "json", MARKERS) if calls else []
    if not found:
        return AssistantMessage(content=text)
    written = [
        ("", call.why) if isinstance(call, Unreadable) else (call.name, json.dumps(call.arguments))
        for call in found
    ]
    return AssistantMessage(
        content=text.partition(MARKERS[0])[0],
        tool_calls=[
            ToolCall(id=f"call_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(written)
        ],
    )


def _said(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """What is compared of messages, and shown."""
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


def _message(said: dict[str, Any]) -> Message:
    return Message(said["role"], said["content"])


def _described(tool: Any) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
