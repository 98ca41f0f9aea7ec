"""Tries all answers of a table on the rewards that read them, before a run."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from time import monotonic

from actors.config import ActorsConfig
from actors.errors import RewardFailed
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import Rewards, load_rewards
from actors.shipped import REWARDS
from deploy.runtime.safe_console import SafeConsole
from headway.errors import InputError
from queues.records import Prompt

SECONDS = 900.0
"""Limit of the time that all answers of a table may take."""
ANSWER_SECONDS = 20.0
PROGRESS_SECONDS = 10.0
SHOWN = 10
"""Answers that a message lists; it counts the others."""


def check_answers(actors: ActorsConfig, names: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """Raise InputError, which names the rows, for answers that a reward cannot score.

    Each different answer is tried once, with an empty completion, in as many processes as there are
    cores. What is left after `SECONDS` is not tried, which a note on the terminal says.
    """
    readers = [name for name in names if name in REWARDS and REWARDS[name].traits.reads_answer]
    rows = defaultdict(list)
    for prompt in prompts if readers else ():
        rows[prompt.answer].append(prompt)
    firsts = [same[0] for same in rows.values()]
    processes = len(os.sched_getaffinity(0))
    pool = RewardPool(processes, verifier_seconds=actors.verifier_seconds)
    with closing(pool):
        rewards = load_rewards(
            readers, timeout=ANSWER_SECONDS, options=actors.reward_options, pool=pool
        )
        errors = asyncio.run(_errors(rewards, firsts, 2 * processes)) if firsts else {}
    if errors:
        count = sum(len(rows[prompt.answer]) for prompt in firsts if prompt.prompt_id in errors)
        lines = "".join(f"\n  {error}" for error in list(errors.values())[:SHOWN])
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise InputError(
            f"{count} of {len(prompts)} prompts have an answer that cannot be scored; leave out "
            f"their rows, write their answers differently, or give another actors.reward:{lines}"
            f"{more}"
        )


async def _errors(rewards: Rewards, prompts: Sequence[Prompt], workers: int) -> Mapping[str, str]:
    """Return why prompts cannot be scored, by their ids."""
    console, began = SafeConsole(stderr=True), monotonic()
    errors: dict[str, str] = {}
    said, tried, rest = began, 0, iter(prompts)

    async def work() -> None:
        nonlocal said, tried
        for prompt in rest:
            try:
                await rewards.score(prompt, "")
            except RewardFailed as error:
                errors[prompt.prompt_id] = str(error)
            tried += 1
            if (now := monotonic()) - said > PROGRESS_SECONDS:
                console.print(f"read {tried:,} of {len(prompts):,} answers")
                said = now
            if now - began > SECONDS:
                return

    await asyncio.gather(*(work() for _ in range(workers)))
    if tried < len(prompts):
        console.print(
            f"note: {tried:,} of {len(prompts):,} answers were read in {SECONDS:g} s; one of the "
            "others that cannot be scored fails its rollouts"
        )
    return {
        prompt.prompt_id: errors[prompt.prompt_id]
        for prompt in prompts
        if prompt.prompt_id in errors
    }
