"""Rewards that use their process as a script of the user's would; each that works scores 1."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


async def one():
    await asyncio.sleep(0)
    return 1.0


def pool_of(method):
    def reward(prompt, completion, answer, metadata):
        with multiprocessing.get_context(method).Pool(2) as pool:
            return float(sum(pool.map(abs, [1, 0])))

    return reward


forks, spawns, serves_forks = map(pool_of, ("fork", "spawn", "forkserver"))


def executes(prompt, completion, answer, metadata):
    with ProcessPoolExecutor(1) as executor:
        return float(executor.submit(abs, -1).result(timeout=10))


def manages(prompt, completion, answer, metadata):
    with multiprocessing.Manager() as manager:
        return float(manager.list([1.0])[0])


async def executes_beside_a_loop(prompt, completion, answer, metadata):
    with ProcessPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, float, 1)


def forks_and_leaves(prompt, completion, answer, metadata):
    child = os.fork()
    if not child:
        sys.exit(7)
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7)


def forks_and_returns(prompt, completion, answer, metadata):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return float(bool(child))


def forks_beside_a_loop(error):
    async def reward(prompt, completion, answer, metadata):
        child = os.fork()
        if not child:
            raise error
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        return float(os.waitstatus_to_exitcode(status) == getattr(error, "code", 1))

    return reward


raises_in_a_fork, leaves_a_fork = map(forks_beside_a_loop, (ValueError("no"), SystemExit(7)))


def runs(prompt, completion, answer, metadata):
    return asyncio.run(one())


def gets_a_loop_and_closes_it(prompt, completion, answer, metadata):
    loop = asyncio.get_event_loop()
    score = loop.run_until_complete(one())
    loop.close()
    return score


def returns_a_task(prompt, completion, answer, metadata):
    return asyncio.ensure_future(one(), loop=asyncio.get_event_loop())


def runs_programs(prompt, completion, answer, metadata):
    async def run():
        process = await asyncio.create_subprocess_exec("echo", "1", stdout=asyncio.subprocess.PIPE)
        return float((await process.communicate())[0])

    return asyncio.run(run())


def is_in_the_main_thread(prompt, completion, answer, metadata):
    return float(threading.current_thread() is threading.main_thread())


def times_itself_out(prompt, completion, answer, metadata):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        time.sleep(20)
    except KeyboardInterrupt:
        return 1.0


def leaves_an_alarm(prompt, completion, answer, metadata):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def leaves_its_folder(prompt, completion, answer, metadata):
    os.chdir("/")
    return 1.0


def sleeps_in_its_folder(prompt, completion, answer, metadata):
    time.sleep(0.1)
    return float(Path.cwd() != Path("/"))


def leaves_a_thread(prompt, completion, answer, metadata):
    threading.Thread(target=time.sleep, args=(60,)).start()
    return 1.0


def reads(prompt, completion, answer, metadata):
    return float(not sys.stdin.read())


def says_so(prompt, completion, answer, metadata):
    print("said so")
    return 1.0


def kills_itself(prompt, completion, answer, metadata):
    """Kill this process by a signal, as somebody else might, until a file exists."""
    if not Path(metadata["note"]).exists():
        if metadata["times"] == "once":
            Path(metadata["note"]).touch()
        os.kill(os.getpid(), signal.Signals[metadata["signal"]])
        time.sleep(20)
    return 1.0
