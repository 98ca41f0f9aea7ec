"""Scores of held-out evaluations: the mean of the rollouts, and the best of several of a prompt."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headway import clock
from queues.readers.group_history import last_lease
from queues.records import Evaluation
from tests.queues.conftest import answer, make_broker, make_prompts, opened

WAIT = 10.0


def scored(
    directory: Path, rewards: Sequence[float | None], *, prompts: int, before: int
) -> Evaluation:
    """Return the outcome of samples with these rewards; restart the broker at `before`."""

    async def answer_some(count: int) -> Evaluation | None:
        async with opened(make_broker(directory, max_attempts=1)) as broker:
            samples = len(rewards) // prompts
            await broker.evaluate(
                "e", make_prompts(prompts) * samples, temperature=1.0, min_version=0
            )
            await broker.serving("a", 0)
            leases = await broker.lease("a", count, WAIT) if count else []
            for lease in leases:
                reward = rewards[int(lease.group_id[1:]) - 1]
                if reward is None:
                    await broker.fail("a", lease.group_id, 1, reason="reward", error="no number")
                else:
                    await broker.put("a", answer(lease, reward=reward))
            return await broker.evaluation("e", 0.0)

    asyncio.run(answer_some(before))
    outcome = asyncio.run(answer_some(len(rewards) - before))
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("before", [0, 2, 5, 6])
def test_a_prompt_of_which_a_sample_failed_is_not_in_pass_at_k(tmp_path: Path, before: int) -> None:
    """Of three prompts the first is complete, the second half failed, and the third altogether."""
    outcome = scored(tmp_path, [0.0, 1.0, None, 0.5, None, None], prompts=3, before=before)
    assert (outcome.count, outcome.failed, outcome.score) == (6, 3, 0.5)
    assert (outcome.best, outcome.incomplete) == (0.5, 2)


@pytest.mark.parametrize("before", [0, 4])
def test_pass_at_k_of_complete_prompts_is_the_mean_of_their_best(
    tmp_path: Path, before: int
) -> None:
    outcome = scored(tmp_path, [0.0, 1.0, 0.5, 0.0], prompts=2, before=before)
    assert (outcome.score, outcome.best, outcome.incomplete) == (0.375, 0.75, 0)


def test_there_is_no_pass_at_k_where_no_prompt_is_complete(tmp_path: Path) -> None:
    outcome = scored(tmp_path, [1.0, None, None, 0.0], prompts=2, before=0)
    assert (outcome.score, outcome.best, outcome.incomplete) == (0.5, None, 2)


async def test_the_last_lease_of_a_run_is_that_of_a_train_group(tmp_path: Path) -> None:
    async with opened(make_broker(tmp_path)) as broker:
        await broker.serving("a", 0)
        assert last_lease(tmp_path) is None
        await broker.issue(make_prompts(2), cursor="2")
        await broker.lease("a", 2, WAIT)
        begin = clock.now()
        await broker.lease("a", 2, WAIT)
        end = clock.now()
        await broker.evaluate("e", make_prompts(1), temperature=0.0, min_version=0)
        assert len(await broker.lease("a", 1, WAIT)) == 1
        newest = last_lease(tmp_path)
        assert newest is not None
        assert begin <= newest <= end
