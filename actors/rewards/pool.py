"""Calls rewards in processes of their own, so that none can block, crash or fill an actor.

    call ─▶ a plain function ─▶ waits for a place ─▶ a process to itself
        └─▶ a coroutine ──────▶ one process for all of them ──blocked or dead──▶ again, alone

A call past its deadline ends with its process, and the process is replaced; so is one that has
taken half of its memory, which a reward that leaks comes to. Who blocked or killed the process that
coroutines share cannot be told, so all of them are called again, each in a process to itself. A
call that takes longer than `SLOW_SECONDS` gives its place to the next one: those that hang delay
others by no more than that, until `MOST` times the usual number of processes run.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

from actors.errors import RewardFailed
from actors.rewards.process import Home, ProcessEnded, RewardProcess, Unanswered

SLOW_SECONDS = 1.0
MOST = 8
LOAD_SECONDS = 60.0
"""Deadline of a process to start and to import a reward, apart from that of its calls."""
GRACE_SECONDS = 1.0
"""What a process gets to admit that a coroutine was cancelled."""
SHARED = 256
"""Coroutines that wait in one process at once."""


class RewardPool:
    """Processes for rewards; none runs before the first call.

    They run on the cores that this process has now: an engine may bind it to fewer later.

    Args:
        processes: Plain functions that are called at once, apart from those that are slow.
        memory_gib: Limit of each process.
    """

    def __init__(self, processes: int = 2, memory_gib: float = 4.0) -> None:
        self._memory = int(memory_gib * 2**30)
        self._home = Home.here()
        self._processes = processes
        self._idle: list[RewardProcess] = []
        self._all: set[RewardProcess] = set()
        self._shared: RewardProcess | None = None
        self._calls: set[asyncio.Task[dict[str, float]]] = set()
        self._places = asyncio.Semaphore(processes)
        self._running = asyncio.Semaphore(MOST * processes)
        self._waiting = asyncio.Semaphore(SHARED)

    async def call(
        self,
        reward: tuple[str, dict[str, Any]],
        arguments: Sequence[Any],
        *,
        timeout: float,
        coroutine: bool,
    ) -> dict[str, float]:
        """The parts of one reward.

        A caller that is cancelled leaves the call behind: it goes on until its own deadline.

        Args:
            reward: Its name and options.
            arguments: As JSON has them.
            timeout: Seconds, from when the function begins.
            coroutine: Whether it may wait beside others in one process.

        Raises:
            RewardFailed: It raised, returned no finite numbers, took too long or too much memory,
                or ended its process.
        """
        work = self._beside(reward, arguments, timeout) if coroutine else None
        task = asyncio.create_task(work or self._alone(reward, arguments, timeout))
        self._calls.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def close(self) -> None:
        """Ends all processes; calls that are running fail."""
        for process in list(self._all):
            self._drop(process)

    def _over(self, task: asyncio.Task[dict[str, float]]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even where the caller is gone

    async def _alone(
        self, reward: tuple[str, dict[str, Any]], arguments: Sequence[Any], timeout: float
    ) -> dict[str, float]:
        async with self._running, self._place() as give_back:
            process = self._idle.pop() if self._idle else self._start()
            healthy = False
            try:
                await self._load(process, reward)
                late = asyncio.get_running_loop().call_later(SLOW_SECONDS, give_back)
                try:
                    answer = await process.ask(_message(reward, arguments), timeout)
                finally:
                    late.cancel()
                healthy = not answer.get("memory") and not self._tired(process)
                return self._parts(answer)
            except Unanswered:
                raise RewardFailed(f"took longer than {timeout:g} s") from None
            except ProcessEnded as error:
                raise RewardFailed(str(error)) from None
            finally:
                if healthy and len(self._idle) < self._processes and process in self._all:
                    self._idle.append(process)
                else:
                    self._drop(process)

    async def _beside(
        self, reward: tuple[str, dict[str, Any]], arguments: Sequence[Any], timeout: float
    ) -> dict[str, float]:
        async with self._waiting:
            process = self._shared
            if process is None or process.ended.is_set():
                process = self._shared = self._start()
            try:
                await self._load(process, reward)
                answer = await process.ask(
                    _message(reward, arguments), timeout, grace=GRACE_SECONDS
                )
                if answer.get("memory"):
                    raise Unanswered  # whose memory it was cannot be told
            except TimeoutError:
                raise RewardFailed(f"took longer than {timeout:g} s") from None
            except (Unanswered, ProcessEnded):
                self._leave(process)
                self._drop(process)
            else:
                if self._tired(process):
                    self._leave(process)
                if process is not self._shared and not process.asked:
                    self._drop(process)
                return self._parts(answer)
        return await self._alone(reward, arguments, timeout)

    async def _load(self, process: RewardProcess, reward: tuple[str, dict[str, Any]]) -> None:
        key = json.dumps(reward)
        if key in process.loaded:
            return
        try:
            answer = await process.ask({"load": reward}, LOAD_SECONDS)
        except Unanswered:
            raise ProcessEnded(f"could not be imported within {LOAD_SECONDS:g} s") from None
        if "error" in answer:
            raise RewardFailed(answer["error"])
        process.loaded.add(key)

    def _parts(self, answer: dict[str, Any]) -> dict[str, float]:
        if "error" in answer:
            limit = f" (actors.reward_memory_gib = {self._memory / 2**30:g})"
            raise RewardFailed(answer["error"] + (limit if answer.get("memory") else ""))
        parts: dict[str, float] = answer["parts"]
        return parts

    def _tired(self, process: RewardProcess) -> bool:
        return process.resident > self._memory / 2

    def _start(self) -> RewardProcess:
        process = RewardProcess(self._memory, self._home)
        self._all.add(process)
        return process

    def _leave(self, process: RewardProcess) -> None:
        if self._shared is process:
            self._shared = None

    def _drop(self, process: RewardProcess) -> None:
        self._all.discard(process)
        self._leave(process)
        if process in self._idle:
            self._idle.remove(process)
        process.close()

    @asynccontextmanager
    async def _place(self) -> Any:
        """A place that can be given back early, and is given back once."""
        await self._places.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._places.release()

        try:
            yield give_back
        finally:
            give_back()


def _message(reward: tuple[str, dict[str, Any]], arguments: Sequence[Any]) -> dict[str, Any]:
    return {"call": reward, "arguments": list(arguments)}
