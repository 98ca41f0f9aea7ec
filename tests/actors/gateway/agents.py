"""Agents on the unmodified clients of OpenAI and Anthropic: they call a tool until none is called.

Each takes an open session and a task, and returns the texts and the calls that it got.
"""

import json

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b":  2}}\n</tool_call>'
"""What the policy says to call the tool; no client writes the arguments with these spaces."""
TURNS = 4


def add(a=0, b=0):
    return str(a + b)


def result_of(arguments):
    try:
        return add(**json.loads(arguments))
    except (ValueError, TypeError) as error:
        return f"error: {type(error).__name__}"


def openai_client(opened):
    return AsyncOpenAI(base_url=opened.base_url, api_key=opened.key, max_retries=0)


def anthropic_client(opened):
    return AsyncAnthropic(base_url=opened.address, api_key=opened.key, max_retries=0)


async def chat(opened, task, *, stream=False, turns=TURNS, **options):
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages, got = [{"role": "user", "content": task}], []
    async with openai_client(opened) as client:
        for _ in range(turns):
            asked = {"model": "policy", "messages": messages, "tools": tools, **options}
            if stream:
                message = await _streamed(
                    await client.chat.completions.create(**asked, stream=True)
                )
            else:
                answer = await client.chat.completions.create(**asked)
                message = answer.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            calls = message.get("tool_calls") or []
            got.append((message.get("content") or "", [c["function"]["name"] for c in calls]))
            if not calls:
                break
            for call in calls:
                result = result_of(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return got


async def _streamed(chunks):
    text, calls = "", {}
    async for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                known = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                known["name"] += part.function.name or ""
                known["arguments"] += part.function.arguments or ""
    made = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls.values()
    ]
    message = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": made} if made else message


async def responses(opened, task, *, stream=False, turns=TURNS, **options):
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items, got = [{"role": "user", "content": task}], []
    async with openai_client(opened) as client:
        for _ in range(turns):
            asked = {"model": "policy", "input": items, "tools": tools, **options}
            answer = await client.responses.create(**asked, stream=stream)
            if stream:
                async for event in answer:
                    if event.type in ("response.completed", "response.incomplete"):
                        answer = event.response
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            got.append((answer.output_text, [call.name for call in calls]))
            if not calls:
                break
            for call in calls:
                result = result_of(call.arguments)
                item = {"type": "function_call_output", "call_id": call.call_id, "output": result}
                items.append(item)
    return got


async def messages(opened, task, *, stream=False, turns=TURNS, max_tokens=200, **options):
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    history, got = [{"role": "user", "content": task}], []
    async with anthropic_client(opened) as client:
        for _ in range(turns):
            asked = {"model": "policy", "messages": history, "tools": tools, **options}
            if stream:
                async with client.messages.stream(**asked, max_tokens=max_tokens) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked, max_tokens=max_tokens)
            history.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            text = "".join(block.text for block in answer.content if block.type == "text")
            got.append((text, [call.name for call in calls]))
            if not calls:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": result_of(json.dumps(call.input)),
                }
                for call in calls
            ]
            history.append({"role": "user", "content": results})
    return got


AGENTS = {"chat": chat, "responses": responses, "messages": messages}
