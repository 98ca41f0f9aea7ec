"""Measures how many scores a second one process gives: rewards that run in it, and in a pool.

    headway bench rewards

Medians of repeated rounds; raw numbers are stored under benchmarks/results/. Of those in a
pool, `similarity` of texts this short costs next to nothing, so its rate is that of the hop.
"""

import asyncio
import statistics
import time

from actors.rewards import RewardPool, Rewards, load_rewards
from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from queues.records import Prompt

ROUNDS = 5
AT_ONCE = 64
PROMPT = Prompt(prompt_id="sums/0/1", text="3+4=", answer="7")
SCORES = {"exact_match": 20_000, "numeric_match": 20_000, "similarity": 2_000, "math_verify": 500}


async def rate(rewards: Rewards, count: int) -> float:
    """Scores a second, `AT_ONCE` of them asked for side by side."""
    began = time.perf_counter()

    async def some() -> None:
        for _ in range(count // AT_ONCE):
            await rewards.score(PROMPT, "the answer is 7")

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return (count // AT_ONCE) * AT_ONCE / (time.perf_counter() - began)


async def measure() -> dict[str, list[float]]:
    """Rates by reward, one a round, after a round that starts the processes."""
    pool = RewardPool(processes=1)
    found = {}
    try:
        for name, count in SCORES.items():
            rewards = load_rewards([name], pool=pool)
            await rewards.score(PROMPT, "7")
            found[name] = [await rate(rewards, count) for _ in range(ROUNDS)]
    finally:
        pool.close()
    return found


def main() -> None:
    """Prints the medians and stores everything."""
    file = RESULTS / "reward_rate.json"
    reserve(file)
    rates = asyncio.run(measure())
    for name, values in rates.items():
        print(f"{name:15} {statistics.median(values):10,.0f} scores/s, one process")
    result = {**environment(), "rounds": ROUNDS, "at_once": AT_ONCE, "scores_per_second": rates}
    store(result, file)


if __name__ == "__main__":
    main()
