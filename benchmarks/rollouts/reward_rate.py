"""Scores per second of one process: rewards that run in it, and in a pool.

    headway bench rewards

Medians of repeated rounds. Of the rewards in a pool, `similarity` of texts this short costs next to
nothing, so its rate is that of the call to the pool.
"""

import asyncio
import time
from collections.abc import Iterator
from statistics import median

from actors.rewards.pool import RewardPool
from actors.rewards.rewards import Rewards, load_rewards
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study
from queues.records import Prompt

ROUNDS = 5
AT_ONCE = 64
PROMPT = Prompt(prompt_id="sums/0/1", text="3+4=", answer="7")
SCORES = {"exact_match": 20_000, "numeric_match": 20_000, "similarity": 2_000, "math_verify": 500}


async def rate(rewards: Rewards, count: int) -> float:
    """Return the scores per second, with `AT_ONCE` of them asked for at once."""
    began = time.perf_counter()

    async def score() -> None:
        for _ in range(count // AT_ONCE):
            await rewards.score(PROMPT, "the answer is 7")

    await asyncio.gather(*(score() for _ in range(AT_ONCE)))
    return (count // AT_ONCE) * AT_ONCE / (time.perf_counter() - began)


async def rates() -> dict[str, list[float]]:
    """Return the rates by reward, after one score that starts the processes."""
    pool = RewardPool(processes=1)
    measured = {}
    try:
        for name, count in SCORES.items():
            rewards = load_rewards([name], pool=pool)
            await rewards.score(PROMPT, "7")
            measured[name] = [await rate(rewards, count) for _ in range(ROUNDS)]
    finally:
        pool.close()
    return measured


def measure(options: Options) -> Iterator[Record]:
    yield {"rounds": ROUNDS, "at_once": AT_ONCE, "scores_per_second": asyncio.run(rates())}


def table(record: Record) -> str:
    return "\n".join(
        f"{name:15} {median(values):10,.0f} scores/s, one process"
        for name, values in record["scores_per_second"].items()
    )


STUDY = Study(name="rewards", file="reward_rate.json", measure=measure, table=table)
