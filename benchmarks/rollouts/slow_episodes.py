"""Cost of slow environments for an engine on which many episodes are interleaved.

    headway bench episodes [--rates 4000,40000]

256 episodes of four turns run at once; the environment takes 50 ms to 5 s after every turn. Their
engine serves one request after another at a set rate, as Headway's own actor calls it. By Little's
law they cannot make more tokens/s than min(r, N·L / (E[environment time] + L/r)), where r is the
rate and L the tokens of a turn; at least 0.95 of it is the aim. Takes 20 seconds a rate.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Annotated, Any

from actors.config import ActorsConfig
from actors.engines.protocol import Generation, SamplingParameters
from actors.environments.protocol import Message, Turn
from actors.rewards.rewards import load_rewards
from actors.rollout.chat_rendering import Renderer
from actors.rollout.episode import EpisodeRunner
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, number, several
from queues.records import FinishReason, Prompt

EPISODES, TURNS, TOKENS = 256, 4, 64
FASTEST, SLOWEST = 0.05, 5.0
"""Seconds of an environment's answer, which are distributed evenly on a logarithmic scale."""
WARM_UP_SECONDS, SECONDS = 2 * SLOWEST, 10.0
LONGEST = 4096
AIM = 0.95


class EpisodeOptions(Options):
    """Options of `headway bench episodes`."""

    rates: Annotated[Sequence[int], several(number(1), "Tokens/s.")] = (4_000, 8_000, 40_000)


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
    """Serves requests one after another, `TOKENS` to each, at a set number of tokens per second."""

    def __init__(self, rate: float, eos: int) -> None:
        self._seconds, self._eos = TOKENS / rate, eos
        self._free_at = 0.0
        self.turns = 0
        """Requests that were served."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        cache_salt: str | None = None,
    ) -> Generation:
        """See `RolloutEngine.generate`."""
        now = time.perf_counter()
        self._free_at = max(now, self._free_at) + self._seconds
        await asyncio.sleep(self._free_at - now)
        self.turns += 1
        return Generation(
            token_ids=[10] * (TOKENS - 1) + [self._eos],
            logprobs=[-1.0] * TOKENS,
            versions=[0] * TOKENS,
            finish_reason=FinishReason.STOP,
            cache_salt=cache_salt or "0",
        )


async def interleave(rate: float) -> Record:
    """Return the tokens/s of interleaved episodes, and Little's bound for the measured waits."""
    from benchmarks.broker.load import make_lease
    from learner.model.tiny_tokenizer import tiny_tokenizer

    tokenizer = tiny_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz", LONGEST)
    engine: Any = PacedEngine(rate, tokenizer.eos_token_id)  # of the protocol it has what is called
    waits: list[float] = []
    draw = random.Random(0)
    config = ActorsConfig(
        environment=f"{__name__}:SlowEnvironment",
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
        new_environment=lambda: SlowEnvironment(waits, draw),
        rewards=rewards,
        heldout_rewards=rewards,
        max_model_len=LONGEST,
    )
    numbers = itertools.count()

    async def repeat() -> None:
        while True:
            await runner.run(make_lease(next(numbers)), 0)

    async with asyncio.TaskGroup() as group:
        episodes = [group.create_task(repeat()) for _ in range(EPISODES)]
        await asyncio.sleep(WARM_UP_SECONDS)
        turns, began = engine.turns, time.perf_counter()
        await asyncio.sleep(SECONDS)
        measured = TOKENS * (engine.turns - turns) / (time.perf_counter() - began)
        for episode in episodes:
            episode.cancel()
    bound = min(rate, EPISODES * TOKENS / (fmean(waits) + TOKENS / rate))
    return {
        "rate": rate,
        "tokens_per_second": measured,
        "environment_seconds_mean": fmean(waits),
        "bound_tokens_per_second": bound,
        "share": measured / bound,
    }


def measure(options: EpisodeOptions) -> Iterator[Record]:
    yield {"episodes": EPISODES, "turns": TURNS, "seconds": SECONDS}
    results: list[Record] = []
    for rate in options.rates:
        results.append(asyncio.run(interleave(rate)))
        yield {"results": results}


def table(record: Record) -> str:
    row = "engine of {rate:,.0f} tokens/s: {tokens_per_second:,.0f} of "
    row += "{bound_tokens_per_second:,.0f} tokens/s = {share:.3f}"
    return "\n".join(row.format(**figures) for figures in record["results"])


STUDY = Study(
    name="episodes",
    options=EpisodeOptions,
    file="slow_episodes.json",
    measure=measure,
    table=table,
    misses=lambda record: [
        f"{row['share']:.3f} at {row['rate']:,.0f} tokens/s"
        for row in record["results"]
        if row["share"] < AIM
    ],
)
