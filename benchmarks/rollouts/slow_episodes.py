"""Measures what slow environments cost an engine on which many episodes are interleaved.

    headway bench episodes [--engine vllm]

256 episodes of several turns run at once; after every turn the environment takes from 50 ms to 5 s,
evenly on a logarithmic scale, 1.07 s in the mean. By Little's law N episodes that sample L tokens a
turn cannot make more tokens a second than

    min(r, N·L / (E[environment time] + L/r)),

where r is what the same engine makes of as many episodes of a single turn. The figure of merit is
the share of it that is reached; it must be at least 0.95. Beside it, for vLLM, the share of what it
makes of single turns that are as many at once and have contexts as long. Engines are one that
shares out a set rate among its requests, at several rates about the knee, and vLLM with a tiny
model. All is measured in one process, after a warm-up; raw numbers are stored under
benchmarks/results/. Leaves out the broker, and that a group waits for its last rollout.
"""

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actors.config import ActorsConfig
from actors.engines.model_folder import load_tokenizer
from actors.engines.protocol import Generation, RolloutEngine, SamplingParameters
from actors.environments.protocol import Environment, Message, Turn
from actors.environments.single_turn import SingleTurn
from actors.rewards import load_rewards, load_shaping
from actors.rollout.chat_rendering import Renderer
from actors.rollout.episode import EpisodeRunner
from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from queues.records import FinishReason, Lease, Prompt, Purpose

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
EPISODES, TURNS, TOKENS = 256, 4, 64
FASTEST, SLOWEST = 0.05, 5.0
"""Seconds of an environment's answer."""
TICK_SECONDS = 0.005
LONGEST = 4096


@dataclass(slots=True)
class Waits:
    """What environments did, all episodes together."""

    lot: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: list[float] = field(default_factory=list)

    def draw(self) -> float:
        """How long the next answer takes."""
        waits = FASTEST * (SLOWEST / FASTEST) ** self.lot.random()
        self.seconds.append(waits)
        return waits


class Slow:
    """An environment that takes its time after every turn (an `Environment`)."""

    def __init__(self, waits: Waits) -> None:
        self._waits, self._left = waits, TURNS

    async def reset(self, prompt: Prompt) -> list[Message]:
        """See `Environment.reset`."""
        return [Message("user", prompt.text)]

    async def step(self, message: Message) -> Turn:
        """See `Environment.step`."""
        await asyncio.sleep(self._waits.draw())
        self._left -= 1
        return Turn([Message("user", "goon")], 0.0, done=self._left == 0)


class PacedEngine:
    """Shares out a set number of tokens a second among its requests, `TOKENS` to each."""

    def __init__(self, rate: float, eos: int) -> None:
        self._rate, self._eos = rate, eos
        self.tokens = self.turns = self.said = self.given = 0
        self._waiting: list[tuple[list[int], asyncio.Event]] = []
        """Tokens left, in a list of one, and who waits for them."""

    async def pace(self) -> None:
        """Gives tokens, one to each in turn, until it is cancelled."""
        last, due = time.perf_counter(), 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            due = due + (now - last) * self._rate if self._waiting else 0.0
            last = now
            while due >= 1 and self._waiting:
                row = self._waiting[: int(due)]
                due -= len(row)
                self.tokens += len(row)
                for left, _ in row:
                    left[0] -= 1
                rest = [*self._waiting[len(row) :], *row]  # the others come next
                for left, done in row:
                    if not left[0]:
                        done.set()
                self._waiting = [one for one in rest if one[0][0]]

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
        self.said += TOKENS
        self.given += len(prompt_ids)
        return Generation(
            token_ids=[10] * (TOKENS - 1) + [self._eos],
            logprobs=[-1.0] * TOKENS,
            versions=[0] * TOKENS,
            finish_reason=FinishReason.STOP,
            cache_salt=cache_salt or "0",
        )


@dataclass(slots=True)
class Counted:
    """An engine, and what it has generated."""

    engine: RolloutEngine
    tokens: int = 0
    turns: int = 0
    given: int = 0
    """Tokens of the prompts of finished turns."""

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], *more: Any, **keywords: Any
    ) -> Generation:
        """See `RolloutEngine.generate`."""
        found = await self.engine.generate(request_id, prompt_ids, *more, **keywords)
        self.tokens += len(found.token_ids)
        self.given += len(prompt_ids)
        self.turns += 1
        return found

    @property
    def said(self) -> int:
        """Tokens of finished turns."""
        return self.tokens


async def measure(
    engine: Any,
    tokenizer: Any,
    new_environment: Callable[[], Environment],
    *,
    seconds: float,
    episodes: int = EPISODES,
    prompt_tokens: int = 0,
) -> dict[str, float]:
    """Tokens a second and a turn of episodes that are at once, after a warm-up.

    Args:
        engine: What is measured.
        tokenizer: Of its model, with a token for each character.
        new_environment: Of each episode.
        seconds: That count.
        episodes: How many.
        prompt_tokens: Fewest of a prompt; there are as many prompts as episodes, so that a cache
            has them after a while.
    """
    config = ActorsConfig(reward=("exact_match",), max_new_tokens=LONGEST - 64)
    rewards = load_rewards(config.reward)
    runner = EpisodeRunner(
        engine_id="engine-0",
        engine=engine,
        renderer=Renderer(tokenizer),
        environment="slow",
        new_environment=new_environment,
        environment_timeout=60.0,
        max_turns=TURNS,
        rewards=rewards,
        heldout_rewards=rewards,
        shaping=load_shaping(config),
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=config.max_new_tokens),
        max_model_len=LONGEST,
        timeout=600.0,
    )
    numbers = itertools.count()
    turns, said, given = engine.turns, engine.said, engine.given

    async def go_on() -> None:
        while True:
            number = next(numbers)
            await runner.run(_lease(number, f"{number % episodes}".ljust(prompt_tokens, "x")), 0)

    players = [asyncio.create_task(go_on()) for _ in range(episodes)]
    try:
        await asyncio.sleep(2 * SLOWEST)
        tokens, began = engine.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - began
        tokens = engine.tokens - tokens
        turns, said, given = engine.turns - turns, engine.said - said, engine.given - given
    finally:
        for player in players:
            player.cancel()
        ended = await asyncio.gather(*players, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            raise error if isinstance(error, BaseException) else RuntimeError(f"ended: {error}")
    return {
        "tokens_per_second": tokens / elapsed,
        "tokens_per_turn": said / turns,
        "prompt_tokens": given / turns,
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
    """Single turns, then slow episodes on the same engine, and the share of Little's law."""
    single = await measure(engine, tokenizer, SingleTurn, seconds=seconds)
    waits = Waits()
    slow = await measure(engine, tokenizer, partial(Slow, waits), seconds=2 * seconds)
    rate, length = single["tokens_per_second"], slow["tokens_per_turn"]
    mean_wait = sum(waits.seconds) / len(waits.seconds)
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


async def alike(
    engine: Any, tokenizer: Any, found: dict[str, float], *, seconds: float
) -> dict[str, float]:
    """Single turns of as many requests at once, with contexts as long, as slow episodes had.

    Fewer requests and longer contexts make an engine slower, which `compare` takes for a loss.

    Args:
        engine: As in `compare`.
        tokenizer: Likewise.
        found: By `compare`.
        seconds: That count.
    """
    waiting = found["tokens_per_second"] / found["tokens_per_turn"]
    requests = EPISODES - waiting * found["environment_seconds_mean"]
    single = await measure(
        engine,
        tokenizer,
        SingleTurn,
        seconds=seconds,
        episodes=max(1, round(requests)),
        prompt_tokens=round(found["prompt_tokens"]),
    )
    rate = single["tokens_per_second"]
    return {
        "requests": requests,
        "alike_tokens_per_second": rate,
        "share_of_alike": found["tokens_per_second"] / rate,
    }


async def paced(rate: float, tokenizer: Any, seconds: float) -> dict[str, float]:
    """The comparison on an engine of a set rate."""
    engine = PacedEngine(rate, tokenizer.eos_token_id)
    pacing = asyncio.create_task(engine.pace())
    try:
        return await compare(engine, tokenizer, seconds=seconds)
    finally:
        pacing.cancel()
        with suppress(asyncio.CancelledError):
            await pacing


async def real(folder: Path, tokenizer: Any, seconds: float) -> dict[str, float]:
    """The comparison on vLLM, bound to the first core."""
    from actors.engines.vllm import VllmEngine
    from actors.engines.vllm_settings import VllmSettings

    engine = VllmEngine(
        VllmSettings(
            str(folder),
            dtype="float32",
            max_model_len=LONGEST,
            max_num_seqs=EPISODES,
            cores=str(min(os.sched_getaffinity(0))),
            kv_cache_gib=2,
            initial_version=0,
        )
    )
    await engine.start()
    try:
        counted = Counted(engine)
        found = await compare(counted, tokenizer, seconds=seconds)
        return {**found, **await alike(counted, tokenizer, found, seconds=seconds)}
    finally:
        await engine.close()


def measurements(chosen: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every comparison that was asked for."""
    tokenizer = load_tokenizer(str(folder))
    if chosen.engine in ("paced", "both"):
        for rate in chosen.rates:
            figures = asyncio.run(paced(rate, tokenizer, chosen.seconds))
            yield {"engine": f"paced at {rate:,.0f}", **figures}
    if chosen.engine in ("vllm", "both"):
        yield {"engine": "vllm", **asyncio.run(real(folder, tokenizer, chosen.seconds))}


def main() -> None:
    """Prints a line for each engine and stores everything."""
    parser = argparse.ArgumentParser(prog="headway bench episodes", description=__doc__)
    parser.add_argument("--engine", choices=("paced", "vllm", "both"), default="both")
    parser.add_argument("--rates", type=float, nargs="+", default=[4_000, 8_000, 40_000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of single turns; slow: twice")
    chosen = parser.parse_args()
    file = RESULTS / f"slow_episodes_{chosen.engine}.json"
    reserve(file)
    from learner.config.learner import TinyModelConfig
    from learner.model.policy import build_tiny

    results = []
    with tempfile.TemporaryDirectory() as name:
        sizes = {"hidden_size": 128, "layers": 3, "intermediate_size": 320}
        build_tiny(
            TinyModelConfig(characters=CHARACTERS, context=LONGEST, **sizes), Path(name), seed=0
        )
        for row in measurements(chosen, Path(name)):
            results.append(row)
            print(
                f"{row['engine']:15} {row['tokens_per_second']:9,.0f} of "
                f"{row['bound_tokens_per_second']:9,.0f} tokens/s = {row['share']:.3f} "
                f"(r = {row['single_turn_tokens_per_second']:,.0f})"
                + (f"; {row['share_of_alike']:.3f} of alike" if "requests" in row else ""),
                flush=True,
            )
    settings = {"episodes": EPISODES, "turns": TURNS, "seconds": chosen.seconds}
    store({**environment(), **settings, "results": results}, file)


if __name__ == "__main__":
    main()
