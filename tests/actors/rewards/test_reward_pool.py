"""Rewards in processes of their own: what one does wrong fails it, and it alone."""

import asyncio
import errno
import os
import re
import time
from contextlib import suppress

import psutil
import pytest
from fakes import POOL

from actors.errors import RewardFailed
from actors.rewards.pool import RewardPool
from actors.rewards.process import memory_kills
from actors.rewards.rewards import load_rewards
from headway.errors import InputError
from queues.records import Prompt
from tests.waiting import until

SUM = Prompt(prompt_id="sums/0/1", text="3+4=", answer="7")


@pytest.fixture
def pool():
    POOL.close()  # its processes would be counted too
    pool = RewardPool(processes=2, memory_gib=0.5)
    yield pool
    pool.close()


def rewards(name, pool, *, timeout=20.0, **options):
    return load_rewards([name], timeout=timeout, pool=pool, options={name: options})


@pytest.mark.reported("reward_asyncio_run", "reward_multiprocessing")
@pytest.mark.parametrize(
    "names",
    [
        "forks spawns serves_forks executes manages executes_beside_a_loop",
        "forks_and_leaves forks_and_returns raises_in_a_fork leaves_a_fork executes_beside_a_loop",
        "runs gets_a_loop_and_closes_it runs gets_a_loop_and_closes_it returns_a_task "
        "runs_programs",
        "is_in_the_main_thread times_itself_out leaves_an_alarm sleeps_in_its_folder "
        "leaves_its_folder sleeps_in_its_folder leaves_a_thread reads",
    ],
)
async def test_a_reward_may_use_its_process_as_a_script_would_and_the_next_does_not_notice(
    pool, names
):
    scores = {}
    for name in names.split():
        scores[name] = (await rewards(f"ordinary_rewards:{name}", pool).score(SUM, "7")).total
    assert scores == dict.fromkeys(names.split(), 1.0)
    assert len(pool.alive) <= 2


async def warmed(name, pool, **options):
    """Rewards whose process has started, so that later times are those of calls."""
    result = rewards(name, pool, **options)
    await result.score(SUM, "7")
    return result


def running(argument):
    """Return the living processes below this one, or outside its tree, with an argument."""
    mine = os.getpid() if argument.startswith("actors.") else None
    result = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = mine is None or mine in [parent.pid for parent in process.parents()]
            if ours and argument in process.cmdline() and process.status() != "zombie":
                result.append(process)
    return result


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leaves", r"raised SystemExit\(3\)"),
        ("ends_the_process", r"ended its process \(exit code 3\)"),
        ("crashes", r"ended its process \(SIGSEGV\)"),
        ("gobbles", r"raised MemoryError\(\) \(actors.reward_memory_gib = 0.5\)"),
        ("sleeps", "took longer than 0.3 s"),
        ("loops_in_c", "took longer than 0.3 s"),
        ("waits_for_ever", "took longer than 0.3 s"),
        ("unspeakable", "raised <Unspeakable whose repr fails>"),
        ("raises_at_length", r"raised ValueError\('x{3900,4000}… \(1000014 characters\)"),
        ("many_parts", "returned 100000 numbers, must be at most 64"),
        ("closes_the_channel", r"ended its process \(exit code 1\)"),
    ],
)
async def test_what_a_reward_does_wrong_fails_it_with_the_reason_and_the_next_is_scored(
    pool, name, message
):
    timeout = 0.3 if message == "took longer than 0.3 s" else 20.0
    bad = rewards(f"hostile_rewards:{name}", pool, timeout=timeout)
    with pytest.raises(RewardFailed, match=message) as caught:
        await bad.score(SUM, "7")
    assert f"reward 'hostile_rewards:{name}' of prompt 'sums/0/1' " in str(caught.value)
    assert (await rewards("hostile_rewards:fine", pool).score(SUM, "7")).total == 1.0


@pytest.mark.parametrize("reward", ["call", "coroutine", "verify"])
@pytest.mark.parametrize("lacks", ["process", "thread"])
def test_a_process_that_cannot_be_started_is_tried_again_within_a_limit(
    pool, monkeypatch, caplog, reward, lacks
):
    error = OSError(errno.EAGAIN, "no process") if lacks == "process" else RuntimeError("no thread")

    def fail(*_, **__):
        raise error

    target = "subprocess.Popen" if lacks == "process" else "threading.Thread.start"

    async def score():
        arguments, coroutine = ["?", "7", "7", {}], reward == "coroutine"
        if reward == "verify":
            return await pool.verify(("similarity", {}), arguments, timeout=20.0)
        name = ("hostile_rewards:fine", {})
        return await pool.call(name, arguments, timeout=20.0, coroutine=coroutine)

    monkeypatch.setattr("actors.rewards.pool.PAUSES", (0.01, 0.02))
    with monkeypatch.context() as patch:
        patch.setattr(f"actors.rewards.process.{target}", fail)
        with pytest.raises(RewardFailed, match=f"has no process: its start raised .*no {lacks}"):
            asyncio.run(score())
    assert caplog.text.count("it is called again in") == 2
    assert not pool.alive
    assert not running("actors.rewards.process_main")
    assert sum(asyncio.run(score()).values()) == 1.0


@pytest.mark.reported("reward_killed")
@pytest.mark.parametrize(
    ("number", "times", "calls", "said"),
    [
        ("SIGKILL", "once", 2, r"killed from outside \(SIGKILL\); .*: 2; it is"),
        ("SIGTERM", "once", 2, r"killed from outside \(SIGTERM\); .*: 0; it is called again"),
        ("SIGKILL", "always", 3, r"killed from outside \(SIGKILL\); .*; so did 2 calls before$"),
        ("SIGABRT", "once", 1, r"ended its process \(SIGABRT\)$"),
    ],
)
async def test_a_call_whose_process_is_killed_from_outside_is_repeated_within_a_limit(
    pool, monkeypatch, tmp_path, caplog, number, times, calls, said
):
    of_memory, killed = 2 if ": 2" in said else 0, tmp_path / "killed"
    monkeypatch.setattr("actors.rewards.process.memory_kills", lambda: of_memory * killed.exists())
    monkeypatch.setattr("actors.rewards.pool.PAUSES", (0.01, 0.02))
    metadata = {"note": str(tmp_path / "killed"), "times": times, "signal": number}
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata=metadata)
    scoring = rewards("ordinary_rewards:kills_itself", pool).score(prompt, "7")
    if calls == 2:
        assert (await scoring).total == 1.0
        assert re.search(said, caplog.text)
    else:
        with pytest.raises(RewardFailed, match=said):
            await scoring
    assert caplog.text.count("it is called again in") == calls - 1


@pytest.mark.parametrize("name", ["ordinary_rewards:sleeps_in_its_folder", "similarity"])
async def test_rewards_are_scored_though_their_idle_processes_are_killed(pool, monkeypatch, name):
    monkeypatch.setattr("actors.rewards.pool.PAUSES", (0.01,))
    reward = await warmed(name, pool)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended with its parent
            process.kill()
    assert (await reward.score(SUM, "7")).total == 1.0


def test_the_kernel_says_what_it_ended_for_lack_of_memory(tmp_path):
    (tmp_path / "vmstat").write_text("oom 9\noom_kill 3\noom_group_kill 7\n")
    assert [memory_kills(tmp_path / name) for name in ("vmstat", "none")] == [3, 0]


@pytest.mark.parametrize("name", ["sleeps", "loops_in_c"])
async def test_hung_rewards_delay_others_by_less_than_their_own_limit(pool, name):
    limit = 60.0

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
    assert took < limit / 2


@pytest.mark.parametrize("apart", [0.0, 0.2])
@pytest.mark.parametrize("name", ["blocks", "stops", "blocks_a_while"])
async def test_a_coroutine_that_blocks_fails_alone_and_those_beside_it_are_scored(
    pool, name, apart
):
    both = await warmed(f"hostile_rewards:{name}", pool, timeout=2.0)

    async def score(delay, text):
        await asyncio.sleep(delay)
        return await both.score(SUM, text)

    one, two, blocked, three, four = await asyncio.gather(
        *(score(apart * i, text) for i, text in enumerate(["a", "b", "block", "c", "d"])),
        return_exceptions=True,
    )
    assert [score.total for score in (one, two, three, four)] == [1.0] * 4
    assert isinstance(blocked, RewardFailed)
    assert "took longer than 2 s" in str(blocked)


async def test_coroutines_wait_side_by_side_in_one_process(pool):
    waits = await warmed("hostile_rewards:waits", pool)
    began = time.monotonic()
    await asyncio.gather(*(waits.score(SUM, "7") for _ in range(100)))
    assert (time.monotonic() - began) < 100 * 0.2 / 4
    assert len(pool.alive) == 1


async def test_a_process_that_leaks_is_replaced_before_a_rollout_fails(pool):
    leaks = rewards("hostile_rewards:leaks", pool)
    assert len({(await leaks.score(SUM, "7")).total for _ in range(40)}) >= 2


def test_what_a_reward_prints_is_not_taken_for_its_answer(pool):
    assert asyncio.run(rewards("hostile_rewards:prints", pool).score(SUM, "7")).total == 1.0


def test_a_call_takes_along_what_it_started_even_in_another_session(pool, tmp_path):
    note, seconds = tmp_path / "started", f"3600.{os.getpid()}1"
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"note": str(note), "seconds": seconds})
    reward = rewards("hostile_rewards:starts_another", pool, timeout=3.0)
    with pytest.raises(RewardFailed, match="took longer"):
        asyncio.run(reward.score(prompt, "7"))
    assert note.exists()
    until(lambda: not running(seconds), 20)


def test_processes_end_with_their_pool_and_take_along_what_they_started(pool):
    seconds = f"3600.{os.getpid()}2"
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"seconds": seconds})
    asyncio.run(rewards("hostile_rewards:starts_one_and_returns", pool).score(prompt, "7"))
    assert running(seconds)
    assert running("actors.rewards.process_main")
    pool.close()
    until(lambda: not running(seconds), 20)
    until(lambda: not running("actors.rewards.process_main"), 20)


async def test_a_caller_that_gives_up_leaves_a_pool_that_works(pool):
    stuck = rewards("hostile_rewards:sleeps", pool, timeout=0.5)
    for _ in range(3):
        task = asyncio.create_task(stuck.score(SUM, "7"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await rewards("hostile_rewards:fine", pool).score(SUM, "7")).total == 1.0


def test_options_reach_a_reward_and_wrong_ones_are_input_errors(pool):
    name = "hostile_rewards:scaled"
    score = asyncio.run(rewards(name, pool, factor=3).score(SUM, "77"))
    assert score.parts == {f"{name}/size": 6.0, f"{name}/offset": 0.0}
    with pytest.raises(InputError, match="requires the option factor"):
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


@pytest.mark.parametrize("text", ["5\n", "[]\n", '{"id": "x"}\n', "[" * 10**5 + "\n", "x" * 2**21])
def test_what_a_reward_writes_to_the_channel_fails_its_own_call_at_once(pool, text):
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"text": text})
    writes = rewards("hostile_rewards:writes_to_the_channel", pool)
    began = time.monotonic()
    with pytest.raises(RewardFailed, match="wrote to the channel of its process"):
        asyncio.run(writes.score(prompt, "7"))
    assert time.monotonic() - began < 15
    assert asyncio.run(rewards("hostile_rewards:fine", pool).score(SUM, "7")).total == 1.0


def test_rewards_see_no_secret_but_those_that_the_recipe_names(monkeypatch):
    secret = "s3cret-5b2e9f8810"
    monkeypatch.setenv("SOME_KEY", secret)
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"secret": secret, "name": "SOME_KEY"})
    for names, seen in (((), 0.0), (("SOME_KEY",), 1.0)):
        pool = RewardPool(processes=1, variables=names)
        try:
            named = rewards("hostile_rewards:variable", pool)
            assert asyncio.run(named.score(prompt, "7")).total == seen
            if not names:
                result = asyncio.run(rewards("hostile_rewards:secrets", pool).score(prompt, "7"))
                assert result.total == 0.0
        finally:
            pool.close()


def test_what_a_reward_prints_is_shown_at_once(pool, capfd):
    assert asyncio.run(rewards("ordinary_rewards:says_so", pool).score(SUM, "7")).total == 1.0
    until(lambda: "said so\n" in capfd.readouterr().err, 20)


def test_what_rewards_print_is_forwarded_up_to_a_limit(pool, capfd):
    loud = rewards("hostile_rewards:prints_at_length", pool)
    assert asyncio.run(loud.score(SUM, "7")).total == 1.0
    pool.close()
    assert len(capfd.readouterr().err) <= 64 << 10
