"""Agents on the unmodified clients of OpenAI and Anthropic, in a process of their own.

    python -m benchmarks.rollouts.agent_clients

A line of the standard input is a round, as JSON: `address` of the gateway, `keys` of the sessions,
most `turns`. It is answered by a line with the `calls` of the tool, once every agent has ended.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"name": "add", "description": "adds two numbers", "parameters": SCHEMA}
TASK = "add {} and {}, then go on"


def result_of(arguments: str) -> str:
    """Return the answer of the tool to arguments that a policy wrote."""
    try:
        given = json.loads(arguments)
        return str(given["a"] + given["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}"


async def chat(address: str, key: str, task: str, turns: int, *, stream: bool) -> int:
    """Play an agent on the API of chat completions; return its calls of the tool."""
    messages: list[Any] = [{"role": "user", "content": task}]
    tools: Any = [{"type": "function", "function": TOOL}]
    made = 0
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
        for _ in range(turns):
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
            if stream:
                state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    state.handle_chunk(chunk)
                answer: Any = state.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            message = answer.choices[0].message
            calls = message.tool_calls or []
            for call in calls:  # whose arguments may have been cut off
                call.function.arguments = call.function.arguments or ""
            messages.append(message.model_dump(exclude_none=True, include=SENT))
            made += len(calls)
            if not calls:
                break
            for call in calls:
                result = result_of(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return made


SENT = {"role": True, "content": True, "tool_calls": {"__all__": {"id", "type", "function"}}}
"""Fields of an answer that are sent back."""


async def claude(address: str, key: str, task: str, turns: int, *, stream: bool) -> int:
    """Play an agent on Anthropic's API of messages; return its calls of the tool."""
    history: list[Any] = [{"role": "user", "content": task}]
    tools: Any = [{"name": "add", "description": TOOL["description"], "input_schema": SCHEMA}]
    made = 0
    async with anthropic.AsyncAnthropic(base_url=address, api_key=key, max_retries=0) as client:
        for _ in range(turns):
            asked: dict[str, Any] = {"model": "policy", "messages": history, "tools": tools}
            asked["max_tokens"] = 400
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            history.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            made += len(calls)
            if not calls:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": c.id,
                    "content": result_of(json.dumps(c.input)),
                }
                for c in calls
            ]
            history.append({"role": "user", "content": results})
    return made


MALFORMED = (ValueError, anthropic.BadRequestError, openai.BadRequestError)
"""Ends of agents whose policy wrote a call that their clients cannot read, or send back."""
AGENTS: tuple[tuple[Callable[..., Coroutine[Any, Any, int]], bool], ...] = (
    (chat, False),
    (chat, True),
    (claude, False),
    (claude, True),
)
"""Kinds of agents, and whether their answers are streamed."""


async def play(address: str, keys: list[str], turns: int) -> list[int]:
    """Let an agent of each kind in turn play in every session, all at once."""
    draw = random.Random(keys[0])
    playing = []
    for n, key in enumerate(keys):
        agent, stream = AGENTS[n % len(AGENTS)]
        task = TASK.format(draw.randint(1, 99), draw.randint(1, 99))
        playing.append(agent(address, key, task, turns, stream=stream))
    ends = await asyncio.gather(*playing, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, MALFORMED):
            raise end
    return [end for end in ends if isinstance(end, int)]


def main() -> None:
    """Play rounds until the input ends."""
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            print(json.dumps({"calls": runner.run(play(**json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main()
