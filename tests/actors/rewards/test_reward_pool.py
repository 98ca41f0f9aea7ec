"""Rewards in processes of their own: what one does wrong fails it, and it alone."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from actors.errors import InputError, RewardFailed
from actors.rewards import RewardPool, load_rewards
from queues.records import Prompt

SUM = Prompt(prompt_id="sums/0/1", text="3+4=", answer="7")


@pytest.fixture
def pool():
    pool = RewardPool(processes=2, memory_gib=0.5)
    yield pool
    pool.close()


def rewards(name, pool, *, timeout=20.0, **options):
    return load_rewards([name], timeout=timeout, pool=pool, options={name: options})


async def warmed(name, pool, **options):
    """Rewards whose process has started, so that later times are those of calls."""
    result = rewards(name, pool, **options)
    await result.score(SUM, "7")
    return result


def gone(pid):
    """Whether a process ends within some seconds; one that nobody has waited for has ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leaves", r"raised SystemExit\(3\)"),
        ("ends_the_process", r"ended its process \(exit code 3\)"),
        ("crashes", r"ended its process \(SIGSEGV\)"),
        ("gobbles", r"raised MemoryError\(\) \(actors.reward_memory_gib = 0.5\)"),
        ("sleeps", "took longer than 0.3 s"),
        ("loops_in_c", "took longer than 0.3 s"),
    ],
)
def test_what_a_reward_does_wrong_fails_it_with_the_reason_and_the_next_is_scored(
    pool, name, message
):
    async def both():
        bad = rewards(f"hostile_rewards:{name}", pool, timeout=0.3)
        with pytest.raises(RewardFailed, match=message) as caught:
            await bad.score(SUM, "7")
        assert f"reward 'hostile_rewards:{name}' of prompt 'sums/0/1' " in str(caught.value)
        return (await rewards("hostile_rewards:fine", pool).score(SUM, "7")).total

    assert asyncio.run(both()) == 1.0


@pytest.mark.parametrize("name", ["sleeps", "loops_in_c"])
def test_hung_rewards_delay_others_by_less_than_their_own_limit(pool, name):
    limit = 60.0

    async def scenario():
        fine = await warmed("hostile_rewards:fine", pool)
        stuck = rewards(f"hostile_rewards:{name}", pool, timeout=limit)
        hung = [asyncio.create_task(stuck.score(SUM, "7")) for _ in range(4)]
        await asyncio.sleep(0)
        began = time.monotonic()
        await asyncio.gather(*(fine.score(SUM, "7") for _ in range(20)))
        took = time.monotonic() - began
        assert not any(task.done() for task in hung)
        pool.close()
        failed = await asyncio.gather(*hung, return_exceptions=True)
        assert all(isinstance(error, RewardFailed) for error in failed)
        return took

    assert asyncio.run(scenario()) < limit / 2


def test_a_coroutine_that_blocks_fails_alone_and_those_beside_it_are_scored(pool):
    async def scenario():
        both = rewards("hostile_rewards:blocks", pool, timeout=2.0)
        completions = ["a", "b", "block", "c", "d"]
        return await asyncio.gather(
            *(both.score(SUM, text) for text in completions), return_exceptions=True
        )

    one, two, blocked, three, four = asyncio.run(scenario())
    assert [score.total for score in (one, two, three, four)] == [1.0] * 4
    assert isinstance(blocked, RewardFailed)
    assert "took longer than 2 s" in str(blocked)


def test_coroutines_wait_side_by_side_in_one_process(pool):
    async def scenario():
        waits = await warmed("hostile_rewards:waits", pool)
        began = time.monotonic()
        await asyncio.gather(*(waits.score(SUM, "7") for _ in range(100)))
        return time.monotonic() - began

    assert asyncio.run(scenario()) < 100 * 0.2 / 4
    assert len(pool.alive) == 1


def test_a_process_that_leaks_is_replaced_before_a_rollout_fails(pool):
    async def scenario():
        leaks = rewards("hostile_rewards:leaks", pool)
        return [(await leaks.score(SUM, "7")).total for _ in range(40)]

    pids = asyncio.run(scenario())
    assert len(set(pids)) >= 2


def test_what_a_reward_prints_is_not_taken_for_its_answer(pool):
    assert asyncio.run(rewards("hostile_rewards:prints", pool).score(SUM, "7")).total == 1.0


def test_a_process_ends_with_its_call_and_takes_along_what_it_started(pool, tmp_path):
    note = tmp_path / "pid"
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"note": str(note)})
    reward = rewards("hostile_rewards:starts_another", pool, timeout=3.0)
    with pytest.raises(RewardFailed, match="took longer"):
        asyncio.run(reward.score(prompt, "7"))
    assert gone(int(note.read_text()))


def test_processes_end_with_their_pool(pool):
    score = asyncio.run(rewards("hostile_rewards:own_process", pool).score(SUM, "7"))
    pid = int(score.total)
    assert pid != os.getpid()
    pool.close()
    assert gone(pid)


def test_a_caller_that_gives_up_leaves_a_pool_that_works(pool):
    async def scenario():
        stuck = rewards("hostile_rewards:sleeps", pool, timeout=0.5)
        for _ in range(3):
            task = asyncio.create_task(stuck.score(SUM, "7"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return (await rewards("hostile_rewards:fine", pool).score(SUM, "7")).total

    assert asyncio.run(scenario()) == 1.0


def test_options_reach_a_reward_and_wrong_ones_are_input_errors(pool):
    name = "hostile_rewards:scaled"
    score = asyncio.run(rewards(name, pool, factor=3).score(SUM, "77"))
    assert score.parts == {f"{name}/size": 6.0, f"{name}/offset": 0.0}
    with pytest.raises(InputError, match="missing a required"):
        rewards(name, pool)
    with pytest.raises(InputError, match="has no option faktor"):
        rewards(name, pool, faktor=3)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_rewards_run_on_the_cores_that_their_actor_had_before_its_engine_took_some(pool):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        score = asyncio.run(rewards("hostile_rewards:cores", pool).score(SUM, "7"))
    finally:
        os.sched_setaffinity(0, before)
    assert score.total == len(before)
