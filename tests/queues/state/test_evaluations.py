"""Scores of held-out evaluations: the mean of the rollouts, and the best of several of a prompt."""

import asyncio

import pytest

from headway import clock
from queues.readers.group_history import last_lease
from tests.queues.conftest import answer, make_broker, make_prompts, opened

WAIT = 10.0


def scored(directory, rewards, *, prompts, before):
    """Return the outcome of samples with these rewards; restart the broker at `before`."""

    async def answer_some(count):
        async with opened(make_broker(directory, max_attempts=1)) as broker:
            samples = len(rewards) // prompts
            await broker.evaluate(
                "e", make_prompts(prompts) * samples, temperature=1.0, min_version=0
            )
            await broker.serving("a", 0)
            leases = await broker.lease("a", count, WAIT) if count else []
            for lease in leases:
                assert lease.temperature == 1.0
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


@pytest.mark.parametrize(
    ("rewards", "prompts", "before", "failed", "score", "best", "incomplete"),
    [
        # Of three prompts one is complete, one half failed, and one failed altogether.
        *(([0.0, 1.0, None, 0.5, None, None], 3, n, 3, 0.5, 0.5, 2) for n in (0, 2, 5, 6)),
        *(([0.0, 1.0, 0.5, 0.0], 2, n, 0, 0.375, 0.75, 0) for n in (0, 4)),
        ([1.0, None, None, 0.0], 2, 0, 2, 0.5, None, 2),
        ([None], 1, 0, 1, None, None, 1),
    ],
)
def test_the_score_is_of_samples_and_pass_at_k_of_the_best_of_prompts_of_which_none_failed(
    tmp_path, rewards, prompts, before, failed, score, best, incomplete
):
    outcome = scored(tmp_path, rewards, prompts=prompts, before=before)
    assert (outcome.count, outcome.failed, outcome.score) == (len(rewards), failed, score)
    assert (outcome.best, outcome.incomplete) == (best, incomplete)
    assert outcome.lowest_version == outcome.highest_version == (None if score is None else 0)


async def test_the_last_lease_of_a_run_is_that_of_a_train_group(tmp_path):
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
