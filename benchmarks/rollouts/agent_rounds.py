"""Rounds of agents through the gateway, and of the same conversations by the engine alone."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.assembly import build_engine
from actors.config import ActorsConfig
from actors.engines.protocol import EngineSpec, SamplingParameters
from actors.gateway.open_session import OpenSession, SessionLimits
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.gateway.template import ChatTemplate
from actors.rollout.chat_rendering import Renderer
from benchmarks.harness.record import Record
from benchmarks.rollouts.agent_clients import TASK, TOOL
from deploy.errors import RunFailed
from weight_sync.config import WeightSyncConfig

LENGTH, TURNS, STEPS = 1536, 5, 150
"""Longest context in tokens, most turns of an agent, steps of training."""
SIZE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>"]
THOUGHT = "first we look at the numbers and then we carry one over to the next place"
MERGES = ["th", "th e", "an", "an d", "er", "on", "ar", "we", "at", "to", "ne"]
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(merges: Sequence[str] = MERGES) -> Any:
    """Return a tokenizer that joins characters which the policy samples one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pairs = [(m[0], m[-1]) for m in (merge.split() if " " in merge else merge for merge in merges)]
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = [*SPECIAL, *characters, *("".join(pair) for pair in pairs)]
    made = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(vocabulary)}, merges=pairs))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def answer_of(draw: random.Random, number: int) -> list[str]:
    """Return the tokens of an answer after so many results: a thought, and a call but at last."""
    thought = " ".join(draw.choices(THOUGHT.split(), k=draw.randint(4, 14)))
    if number == TURNS - 2:
        return [*thought, "<|im_end|>"]
    a, b = draw.randint(1, 99), draw.randint(1, 99)
    call = f'\n{{"name": "add", "arguments": {{"a": {a}, "b":  {b}}}}}\n'
    return [*thought, TAGS[0], *call, TAGS[1], "<|im_end|>"]


def conversation(tokenizer: Any, draw: random.Random) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation to learn from, and which of them the policy says."""
    tools, task = [{"type": "function", "function": TOOL}], TASK.format(*draw.sample(range(99), 2))
    messages = [{"role": "user", "content": task}]
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text)["input_ids"]
    said = [False] * len(ids)
    for number in range(TURNS - 1):
        answer = tokenizer.convert_tokens_to_ids(answer_of(draw, number))
        rest = f"\n<|im_start|>tool\n{draw.randint(2, 198)}<|im_end|>\n<|im_start|>assistant\n"
        tail = tokenizer(rest)["input_ids"] if number < TURNS - 2 else []
        ids += [*answer, *tail]
        said += [True] * len(answer) + [False] * len(tail)
    return ids, said


def train_model(folder: Path) -> Any:
    """Write a model that has learnt to call the tool to a folder, with its tokenizer; return it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer, draw = make_tokenizer(), random.Random(0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), max_position_embeddings=LENGTH, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=3, **SIZE,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = [conversation(tokenizer, draw) for _ in range(2)]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
        said = torch.tensor([mask + [False] * (length - len(mask)) for _, mask in rows])
        logits = model(ids).logits[:, :-1][said[:, 1:]]
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    tokenizer.save_pretrained(folder)
    model.eval().save_pretrained(folder)
    return model


class Agents:
    """A gateway with its engine, and the process of the clients."""

    async def start(self, folder: Path, sessions: int) -> None:
        """Start all of it; takes half a minute."""
        from actors.gateway.vllm_app import serving_app

        config = ActorsConfig(
            dtype="float32",
            max_concurrent_rollouts=sessions,
            kv_cache_gib=1,
            reward=("exact_match",),
        )
        spec = EngineSpec(
            index=0, config=config, weight_sync=WeightSyncConfig(), model_path=str(folder), seed=0,
            initial_version=0,
        )  # fmt: skip
        self.tokenizer, self._sessions = make_tokenizer(), sessions
        self._template = ChatTemplate(Renderer(self.tokenizer))
        self._engine: Any = build_engine(spec, self.tokenizer, LENGTH)
        await self._engine.start()
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=1)
        engine: Any = self._engine
        make_app = partial(serving_app, engine, config, sampling)
        self._gateway = Gateway(config.gateway, make_app)
        await self._gateway.start()
        self._clients = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.rollouts.agent_clients",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def close(self) -> None:
        """End all of it."""
        assert self._clients.stdin is not None
        self._clients.stdin.close()
        await self._clients.wait()
        await self._gateway.close()
        await self._engine.close()

    async def ask(self) -> tuple[float, list[OpenSession], int]:
        """Play a round of agents; return its seconds, the sessions, and the calls of the tool."""

        async def on_turn(turn: Any) -> None:
            """Keep nothing: no ledger is measured."""

        limits = SessionLimits(turns=TURNS, tokens=LENGTH, seconds=300.0)
        sessions = [
            self._gateway.open(Session(self._template), limits, on_turn)
            for _ in range(self._sessions)
        ]
        keys = [opened.key for opened in sessions]
        line = {"address": self._gateway.address, "keys": keys, "turns": TURNS}
        assert self._clients.stdin is not None
        assert self._clients.stdout is not None
        begin = time.perf_counter()
        self._clients.stdin.write(json.dumps(line).encode() + b"\n")
        answer = await self._clients.stdout.readline()
        seconds = time.perf_counter() - begin
        if not answer:
            raise RunFailed("the process of the agents has ended")
        for opened in sessions:
            await opened.close()
        played = [opened for opened in sessions if opened.session.turns]
        return seconds, played, sum(json.loads(answer)["calls"])

    async def replay(self, sessions: Sequence[OpenSession], number: int) -> float:
        """Sample as many tokens after the same prompts in process; return the seconds."""

        async def one(index: int, session: Session) -> None:
            path = session.path(session.turns - 1)
            mask = session.tokens().loss_mask
            starts = [n for n in range(1, len(mask)) if mask[n] and not mask[n - 1]]
            for turn, start in enumerate(starts):
                tokens = [*mask[start:], False].index(False)
                sampling = SamplingParameters(temperature=1.0, max_new_tokens=tokens)
                parameters = {"ignore_eos": True, "detokenize": False}
                await self._generate(f"{number}/{index}/{turn}", path[:start], sampling, parameters)

        begin = time.perf_counter()
        await asyncio.gather(*(one(n, opened.session) for n, opened in enumerate(sessions)))
        return time.perf_counter() - begin

    async def _generate(
        self, name: str, ids: list[int], sampling: SamplingParameters, others: dict[str, Any]
    ) -> None:
        from actors.engines.vllm_sampled import Sampled

        sampled = Sampled(name)
        parameters = self._engine.parameters(sampling, **others)
        salt = name.rpartition("/")[0]
        async for _ in self._engine.outputs(ids, parameters, sampled, salt):
            pass
        if len(sampled.generation().token_ids) != sampling.max_new_tokens:
            raise RunFailed(f"{name}: the engine sampled another number of tokens")


def check(sessions: Sequence[OpenSession], tokenizer: Any, model: Any) -> Record:
    """Compare what the sessions hold with itself, and with the log-probabilities of the model."""
    import torch

    figures = {"prompts": 0, "retokenised": 0, "would_differ": 0, "sampled": 0, "stamped": 0}
    largest = 0.0
    for opened in sessions:
        session, tokens = opened.session, opened.session.tokens()
        paths = [session.path(n) for n in range(session.turns)]
        for before, after in pairwise(paths):
            figures["prompts"] += 1
            figures["retokenised"] += sum(a != b for a, b in zip(before, after, strict=False))
            figures["would_differ"] += tokenizer(tokenizer.decode(before))["input_ids"] != before
        ids, sampled = torch.tensor(tokens.token_ids), torch.tensor(tokens.loss_mask)
        given = torch.tensor(tokens.behavior_logprobs)
        stamped = torch.tensor(tokens.versions) >= 0
        figures["sampled"] += int(sampled.sum())
        figures["stamped"] += int((sampled & stamped & (given < 0)).sum())
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float().log_softmax(-1)
        learner = logits[:-1].gather(1, ids[1:, None])[:, 0]
        if not tokens.segments:
            largest = max(largest, float((learner - given[1:])[sampled[1:]].abs().max()))
    figures["segments"] = sum(len(opened.session.tokens().segments) for opened in sessions)
    return {**figures, "logprob_difference": largest}


async def measure_rounds(count: int, sessions: int, folder: Path) -> list[Record]:
    """Return the figures of `count` rounds, after one that warms up."""
    model = train_model(folder)
    agents, rounds = Agents(), list[Record]()
    await agents.start(folder, sessions)
    try:
        for number in range(count + 1):
            seconds, opened, calls = await agents.ask()
            alone = await agents.replay(opened, number)
            found = check(opened, agents.tokenizer, model)
            turns = sum(one.session.turns for one in opened)
            rounds.append(
                {"gateway": seconds, "alone": alone, "turns": turns, "calls": calls, **found}
            )
        return rounds[1:]
    finally:
        await agents.close()
