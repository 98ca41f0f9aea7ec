"""Tries all answers of a table on the rewards that read them, before a run."""

import asyncio
import os
from collections.abc import Sequence
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
    if not readers:
        return
    processes = len(os.sched_getaffinity(0))
    with closing(RewardPool(processes, verifier_seconds=actors.verifier_seconds)) as pool:
        options = actors.reward_options
        rewards = load_rewards(readers, timeout=ANSWER_SECONDS, options=options, pool=pool)
        different = list({prompt.answer: prompt for prompt in prompts}.values())
        errors = asyncio.run(_errors(rewards, different, 2 * processes))
    rows = [f"\n  {p.prompt_id}: {errors[p.answer]}" for p in prompts if p.answer in errors]
    if rows:
        more = f"\n  and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        raise InputError(
            f"of {len(prompts)} prompts, {len(rows)} have an answer that cannot be scored; leave "
            "out their rows, write their answers differently, or give another actors.reward:"
            + "".join(rows[:SHOWN])
            + more
        )


async def _errors(
    rewards: Rewards, prompts: Sequence[Prompt], workers: int
) -> dict[str | None, str]:
    """Return why answers cannot be scored."""
    console, began = SafeConsole(stderr=True), monotonic()
    errors: dict[str | None, str] = {}
    reported, tried, rest = began, 0, iter(prompts)

    async def work() -> None:
        nonlocal reported, tried
        for prompt in rest:
            try:
                await rewards.score(prompt, "")
            except RewardFailed as error:
                name = f" of prompt {prompt.prompt_id!r}"
                errors[prompt.answer] = str(error).replace(name, "", 1)
            tried += 1
            if (now := monotonic()) - reported > PROGRESS_SECONDS:
                console.print(f"read {tried:,} of {len(prompts):,} answers")
                reported = now
            if now - began > SECONDS:
                return

    await asyncio.gather(*(work() for _ in range(workers)))
    if tried < len(prompts):
        console.print(
            f"note: {tried:,} of {len(prompts):,} answers were read in {SECONDS:g} s; one of the "
            "others that cannot be scored fails its rollouts"
        )
    return errors
