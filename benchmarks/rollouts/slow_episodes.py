"""Cost of slow environments for an engine on which many episodes are interleaved.

    headway bench episodes [--engine vllm]

256 episodes of several turns run at once; the environment takes 50 ms to 5 s after every turn. By
Little's law they cannot make more tokens/s than min(r, N·L / (E[environment time] + L/r)), where r
is the engine's rate with single turns and L the tokens of a turn; at least 0.95 of it is the aim.
"""

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.config import ActorsConfig
from actors.engines.model_folder import load_tokenizer
from actors.engines.protocol import Generation, RolloutEngine, SamplingParameters
from actors.environments.protocol import Environment, Message, Turn
from actors.environments.single_turn import SingleTurn
from actors.rewards import load_rewards
from actors.rollout.chat_rendering import Renderer
from actors.rollout.episode import EpisodeRunner
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice, number, several
from learner.config.learner import TinyModelConfig
from queues.records import FinishReason, Lease, Prompt, Purpose

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
EPISODES, TURNS, TOKENS = 256, 4, 64
FASTEST, SLOWEST = 0.05, 5.0
"""Seconds of an environment's answer."""
TICK_SECONDS = 0.005
LONGEST = 4096


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions(Options):
    """Options of `headway bench episodes`."""

    engine: Annotated[str, choice(("paced", "vllm", "both"), "That is measured.")] = "both"
    rates: Annotated[
        Sequence[float], several(number(1, kind=float), "Tokens/s of paced engines.")
    ] = (4_000.0, 8_000.0, 40_000.0)
    seconds: Annotated[float, typer.Option(help="Of single turns; of slow episodes twice.")] = 10.0


class SlowEnvironment:
    """An `Environment` that answers every turn late, and appends its seconds to a list."""

    def __init__(self, waits: list[float], draw: random.Random) -> None:
        self._waits, self._draw, self._left = waits, draw, TURNS

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        return [Message("user", prompt.text)]

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`."""
        self._waits.append(FASTEST * (SLOWEST / FASTEST) ** self._draw.random())
        await asyncio.sleep(self._waits[-1])
        self._left -= 1
        return Turn([Message("user", "goon")], 0.0, done=self._left == 0)


class PacedEngine:
    """Divides a set number of tokens per second among its requests, `TOKENS` to each."""

    def __init__(self, rate: float, eos: int) -> None:
        self._rate, self._eos = rate, eos
        self.tokens = self.turns = self.finished_tokens = self.prompt_tokens = 0
        self._waiting: list[tuple[list[int], asyncio.Event]] = []
        """Tokens left, in a list of one, and the event of their end."""

    async def pace(self) -> None:
        """Give tokens, one to each request in turn, until cancelled."""
        last, due = time.perf_counter(), 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            due = due + (now - last) * self._rate if self._waiting else 0.0
            last = now
            while due >= 1 and self._waiting:
                served = self._waiting[: int(due)]
                due -= len(served)
                self.tokens += len(served)
                others = self._waiting[len(served) :]
                for left, done in served:
                    left[0] -= 1
                    if not left[0]:
                        done.set()
                self._waiting = [*others, *(request for request in served if request[0][0])]

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        """See `RolloutEngine.generate`."""
        done = asyncio.Event()
        self._waiting.append(([TOKENS], done))
        await done.wait()
        self.turns += 1
        self.finished_tokens += TOKENS
        self.prompt_tokens += len(prompt_ids)
        return Generation(
            token_ids=[10] * (TOKENS - 1) + [self._eos],
            logprobs=[-1.0] * TOKENS,
            versions=[0] * TOKENS,
            finish_reason=FinishReason.STOP,
            cache_salt=cache_salt or "0",
        )


@dataclass(slots=True)
class CountedEngine:
    """An engine with counts of finished turns."""

    engine: RolloutEngine
    tokens: int = 0
    turns: int = 0
    prompt_tokens: int = 0

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], *more: Any, **keywords: Any
    ) -> Generation:
        """See `RolloutEngine.generate`."""
        generation = await self.engine.generate(request_id, prompt_ids, *more, **keywords)
        self.tokens += len(generation.token_ids)
        self.prompt_tokens += len(prompt_ids)
        self.turns += 1
        return generation

    @property
    def finished_tokens(self) -> int:
        """The tokens of finished turns."""
        return self.tokens


async def measure_episodes(
    engine: Any,
    tokenizer: Any,
    new_environment: Callable[[], Environment],
    *,
    seconds: float,
    episodes: int = EPISODES,
    prompt_tokens: int = 0,
) -> dict[str, float]:
    """Return tokens per second and per turn of interleaved episodes, after a warm-up.

    There are as many prompts as episodes, so that a cache has them after a while; each has at
    least `prompt_tokens` tokens, which are characters.
    """
    config = ActorsConfig(
        environment="benchmarks.rollouts.slow_episodes:SlowEnvironment",
        reward=("exact_match",),
        max_new_tokens=LONGEST - 64,
        max_turns=TURNS,
    )
    rewards = load_rewards(config.reward)
    runner = EpisodeRunner(
        engine_id="engine-0",
        engine=engine,
        renderer=Renderer(tokenizer),
        config=config,
        new_environment=new_environment,
        rewards=rewards,
        heldout_rewards=rewards,
        max_model_len=LONGEST,
    )
    numbers = itertools.count()
    before = (engine.turns, engine.finished_tokens, engine.prompt_tokens)

    async def repeat() -> None:
        while True:
            number = next(numbers)
            await runner.run(_lease(number, f"{number % episodes}".ljust(prompt_tokens, "x")), 0)

    episode_tasks = [asyncio.create_task(repeat()) for _ in range(episodes)]
    try:
        await asyncio.sleep(2 * SLOWEST)
        tokens, began = engine.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - began
        tokens = engine.tokens - tokens
        after = (engine.turns, engine.finished_tokens, engine.prompt_tokens)
        turns, finished, prompts = (new - old for new, old in zip(after, before, strict=True))
    finally:
        for task in episode_tasks:
            task.cancel()
        ended = await asyncio.gather(*episode_tasks, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            raise error if isinstance(error, BaseException) else RuntimeError(f"ended: {error}")
    return {
        "tokens_per_second": tokens / elapsed,
        "tokens_per_turn": finished / turns,
        "prompt_tokens": prompts / turns,
    }


def _lease(number: int, text: str) -> Lease:
    return Lease(
        group_id=f"g{number}",
        attempt=1,
        prompt=Prompt(prompt_id=f"bench/0/{number}", text=text, answer="7"),
        group_size=1,
        purpose=Purpose.TRAIN,
        temperature=None,
        start_version=0,
        deadline_version=2,
    )


async def compare(engine: Any, tokenizer: Any, *, seconds: float) -> dict[str, float]:
    """Return the rates of single turns and of slow episodes, and the share of Little's law."""
    single = await measure_episodes(engine, tokenizer, SingleTurn, seconds=seconds)
    waits: list[float] = []
    slow = await measure_episodes(
        engine, tokenizer, partial(SlowEnvironment, waits, random.Random(0)), seconds=2 * seconds
    )
    rate, length = single["tokens_per_second"], slow["tokens_per_turn"]
    mean_wait = sum(waits) / len(waits)
    bound = min(rate, EPISODES * length / (mean_wait + length / rate))
    return {
        "single_turn_tokens_per_second": rate,
        "tokens_per_second": slow["tokens_per_second"],
        "tokens_per_turn": length,
        "prompt_tokens": slow["prompt_tokens"],
        "environment_seconds_mean": mean_wait,
        "bound_tokens_per_second": bound,
        "share": slow["tokens_per_second"] / bound,
    }


async def compare_alike(
    engine: Any, tokenizer: Any, slow: dict[str, float], *, seconds: float
) -> dict[str, float]:
    """Return the rate of single turns with the requests at once and contexts of slow episodes.

    Fewer requests and longer contexts make an engine slower, which `compare` counts as a loss.
    """
    waiting = slow["tokens_per_second"] / slow["tokens_per_turn"]
    requests = EPISODES - waiting * slow["environment_seconds_mean"]
    single = await measure_episodes(
        engine,
        tokenizer,
        SingleTurn,
        seconds=seconds,
        episodes=max(1, round(requests)),
        prompt_tokens=round(slow["prompt_tokens"]),
    )
    rate = single["tokens_per_second"]
    return {
        "requests": requests,
        "alike_tokens_per_second": rate,
        "share_of_alike": slow["tokens_per_second"] / rate,
    }


async def compare_paced(rate: float, tokenizer: Any, seconds: float) -> dict[str, float]:
    engine = PacedEngine(rate, tokenizer.eos_token_id)
    pacing = asyncio.create_task(engine.pace())
    try:
        return await compare(engine, tokenizer, seconds=seconds)
    finally:
        pacing.cancel()
        with suppress(asyncio.CancelledError):
            await pacing


async def compare_vllm(folder: Path, tokenizer: Any, seconds: float) -> dict[str, float]:
    from benchmarks.weights.engine_load import start_engine

    engine = await start_engine(
        folder,
        initial_version=0,
        max_model_len=LONGEST,
        max_concurrent_rollouts=EPISODES,
        cores=(str(min(os.sched_getaffinity(0))),),
        kv_cache_gib=2,
    )
    try:
        counted = CountedEngine(engine)
        slow = await compare(counted, tokenizer, seconds=seconds)
        return {**slow, **await compare_alike(counted, tokenizer, slow, seconds=seconds)}
    finally:
        await engine.close()


def comparisons(options: EpisodeOptions, folder: Path) -> Iterator[Record]:
    tokenizer = load_tokenizer(str(folder))
    for rate in options.rates if options.engine in ("paced", "both") else ():
        figures = asyncio.run(compare_paced(rate, tokenizer, options.seconds))
        yield {"engine": f"paced at {rate:,.0f}", **figures}
    if options.engine in ("vllm", "both"):
        yield {
            "engine": "vllm",
            **asyncio.run(compare_vllm(folder, tokenizer, options.seconds)),
        }


def measure(options: EpisodeOptions) -> Iterator[Record]:
    from learner.model.policy import build_tiny

    yield {"episodes": EPISODES, "turns": TURNS, "seconds": options.seconds}
    results: list[Record] = []
    with tempfile.TemporaryDirectory() as name:
        sizes = {"hidden_size": 128, "layers": 3, "intermediate_size": 320}
        model = TinyModelConfig(characters=CHARACTERS, context=LONGEST, **sizes)
        build_tiny(model, Path(name), seed=0)
        for result in comparisons(options, Path(name)):
            results.append(result)
            print(describe(result), flush=True)
            yield {"results": results}


def describe(result: Record) -> str:
    line = (
        f"{result['engine']:15} {result['tokens_per_second']:9,.0f} of "
        f"{result['bound_tokens_per_second']:9,.0f} tokens/s = {result['share']:.3f} "
        f"(r = {result['single_turn_tokens_per_second']:,.0f})"
    )
    return line + (f"; {result['share_of_alike']:.3f} of alike" if "requests" in result else "")


STUDY = Study(
    name="episodes",
    about=__doc__,
    options=EpisodeOptions,
    file="slow_episodes_{engine}.json",
    measure=measure,
)
