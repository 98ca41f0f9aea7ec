"""Rollouts in which policy and environment say given things, under the four chat templates."""

import asyncio

from fakes import episodes, lease
from real_tokenizers import real_tokenizer

from actors.engines.protocol import Generation, SamplingParameters
from actors.environments.protocol import Message, Turn
from actors.rollout.chat_rendering import Renderer

NAMES = ["qwen3", "llama3", "mistral", "gemma"]
KNOWS_TOOLS = ["qwen3", "llama3"]
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=400)


class Engine:
    """Samples given token ids, ended or cut off, and writes down what it saw and sampled_ids."""

    def __init__(self, speeches):
        self.speeches, self.seen = list(speeches), []

    async def generate(self, request_id, prompt_ids, sampling, *, cache_salt=None):
        sampled_ids, reason = self.speeches[len(self.seen)]
        version = len(self.seen)
        self.seen.append((list(prompt_ids), sampled_ids))
        return Generation(
            token_ids=list(sampled_ids),
            logprobs=[-0.25] * len(sampled_ids),
            versions=[version] * len(sampled_ids),
            finish_reason=reason,
            cache_salt="0",
        )


class Scripted:
    """An environment that says given messages, then ends."""

    def __init__(self, messages):
        self.messages = list(messages)

    async def reset(self, prompt):
        return [Message("user", prompt.text)]

    async def step(self, message):
        if not self.messages:
            return Turn([], 0.0, done=True)
        return Turn([self.messages.pop(0)], 0.5, done=False)


def play(name, engine, messages, text="3+4="):
    runner = episodes(
        engine,
        SAMPLING,
        environment="dialogues:Scripted",
        new_environment=lambda: Scripted(messages),
        renderer=Renderer(real_tokenizer(name)),
        max_model_len=100_000,
    )
    return asyncio.run(runner.run(lease(text=text), 0))
