"""Templates, replies and sessions for the tests of the gateway's tokens."""

import copy
import json
from functools import cache

from characters import TEMPLATE, character_tokenizer
from real_tokenizers import TEMPLATES, real_tokenizer
from transformers import AddedToken

from actors.engines.protocol import Generation
from actors.gateway.template import ChatTemplate
from actors.rollout.chat_rendering import Renderer
from queues.records import FinishReason

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
]
BASES = {"qwen3_tools": "qwen3", "llama3_tools": "llama3"}


@cache
def tokenizer(name):
    """Return the tokenizer of characters, or one with a real vocabulary and template."""
    if name == "characters":
        return character_tokenizer(TEMPLATE)
    if name == "joined":
        return character_tokenizer()
    made = copy.deepcopy(real_tokenizer(BASES[name]))
    if name == "qwen3_tools":
        tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
        made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text().rstrip("\n")
    return made


@cache
def template(name, **options):
    return ChatTemplate(Renderer(tokenizer(name), options=options))


def user(text):
    return {"role": "user", "content": text}


def tool(text, call="call_0"):
    return {"role": "tool", "tool_call_id": call, "content": text}


def assistant(text, *calls, identity="call", **further):
    made = [
        {
            "id": f"{identity}_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {
        "role": "assistant",
        "content": text,
        **({"tool_calls": made} if made else {}),
    } | further


def sampled(ids, version=0, reason=FinishReason.STOP):
    return Generation(
        token_ids=[*ids],
        logprobs=[-0.5 - number / 8 for number in range(len(ids))],
        versions=[version] * len(ids),
        finish_reason=reason,
        cache_salt=f"{version}",
    )
