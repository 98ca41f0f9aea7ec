"""Calls rewards in processes of their own, so that none can block, crash or fill an actor.

    call ─▶ a plain function ─▶ waits for a slot ──▶ a process to itself
        └─▶ a coroutine ──────▶ one process for all of them ──blocked or dead──▶ again, alone
    verify ────────────────────▶ waits for a slot ──▶ `verifier_main`, which forks a child for it

A call past its deadline ends with its process, which is replaced. If the process that coroutines
share blocks or dies, all that wait are called again, each in a process to itself. A call that takes
longer than `SLOW_SECONDS` gives its slot to the next one, until `MOST` times the usual number of
processes run.

A call whose process is killed from outside, as the kernel does where memory is short, or cannot be
started, is repeated after each of `PAUSES`, and fails if that happens at the last time too.
"""

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from actors.errors import RewardFailed, ServiceAway
from actors.rewards.find_reward import Parts
from actors.rewards.process import (
    ProcessEnded,
    ProcessLost,
    RewardProcess,
    Unanswered,
    scrubbed,
    since,
)
from headway.clean_text import register
from headway.output_limits import RateLimit
from headway.user_code import describe_error

LOG = logging.getLogger("headway.rewards")

SLOW_SECONDS = 1.0
MOST = 8
LOAD_SECONDS = 60.0
"""Deadline of a process to start and to import a reward, apart from that of its calls."""
GRACE_SECONDS = 1.0
"""Time for a process to say that a call was late."""
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a call is repeated that has lost its process."""
SHARED = 256
"""Most coroutines that wait in one process at once."""
VERIFIER_BYTES = 1 << 30
"""Most memory of a process that reads one completion."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Variables of a process that forks: numpy's threads would not survive it."""
Scored = Parts | list[Parts]
"""Parts of a score, or of one for each completion of a group."""
Work = Callable[[dict[str, Any], float], Coroutine[Any, Any, Scored]]


class RewardPool:
    """Processes for rewards, on the cores that this one has now; none runs before the first call.

    `processes` is the number of concurrent calls of plain functions and verifiers, apart from slow
    calls. `variables` names variables of the environment that rewards get (see `scrubbed`), and
    `verifier_seconds` is the processor time of a verifier.
    """

    def __init__(
        self,
        processes: int = 2,
        memory_gib: float = 4.0,
        *,
        variables: Iterable[str] = (),
        verifier_seconds: float = 2.0,
    ) -> None:
        self._memory = int(memory_gib * 2**30)
        self._cores = os.sched_getaffinity(0)
        variables = tuple(variables)
        register(variables)
        self._environment = scrubbed(os.environ, variables)
        self._verifier_environment = {**scrubbed(os.environ), **ONE_THREAD}
        self._verifier_seconds = str(verifier_seconds)
        self._processes = processes
        self._output_limit = RateLimit("rewards")
        self._idle: list[RewardProcess] = []
        self.alive: set[RewardProcess] = set()
        self._shared: RewardProcess | None = None
        self._verifiers: RewardProcess | None = None
        self._notes: Counter[str] = Counter()
        """Completions that scored 0 because a verifier failed on them, by reward."""
        self._calls: set[asyncio.Future[Scored]] = set()
        self._slots = asyncio.Semaphore(processes)
        self._running = asyncio.Semaphore(MOST * processes)
        self._waiting = asyncio.Semaphore(SHARED)

    async def call(
        self,
        reward: tuple[str, dict[str, Any]],
        arguments: Sequence[Any],
        *,
        timeout: float,
        coroutine: bool,
    ) -> Scored:
        """Call one reward and return its parts; where the caller is cancelled, the call goes on.

        `reward` is its name and options, `arguments` are JSON values, `timeout` counts seconds from
        the start of the function, and a `coroutine` may share a process with other calls. Raises
        RewardFailed if it raised, returned no finite numbers, took too long or too much memory,
        ended its process, or lost it again and again, killed from outside or not to be started;
        ServiceAway as `outage` decides.
        """
        message = {"call": reward, "arguments": list(arguments), "seconds": timeout}
        work = self._in_shared if coroutine else self._alone
        return await self._finish(work, message, timeout)

    async def verify(
        self, reward: tuple[str, dict[str, Any]], arguments: Sequence[Any], *, timeout: float
    ) -> Scored:
        """Call a verifier as `call` does, in the sandbox; a completion that breaks it scores 0."""
        message = {"call": reward, "arguments": list(arguments), "seconds": timeout}
        return await self._finish(self._verify, message, timeout)

    async def _finish(self, work: Work, message: dict[str, Any], timeout: float) -> Scored:
        task = asyncio.ensure_future(self._unkilled(work, message, timeout))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        return await asyncio.shield(task)

    async def _unkilled(self, work: Work, message: dict[str, Any], timeout: float) -> Scored:
        """Do the work of a call, and again where it has lost its process."""
        pauses = iter(PAUSES)
        while True:
            try:
                return await work(message, timeout)
            except ProcessLost as error:
                if (pause := next(pauses, None)) is None:
                    raise RewardFailed(f"{error}; so did {len(PAUSES)} calls before") from None
                name = message["call"][0]
                LOG.warning("reward %r %s; it is called again in %g s", name, error, pause)
                await asyncio.sleep(pause)
            except ProcessEnded as error:
                raise RewardFailed(str(error)) from None

    def close(self) -> None:
        """End all processes; running calls fail."""
        for process in list(self.alive):
            self._drop(process)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[ExitStack]:
        """Wait for a slot, and give it up at the end, or earlier by closing the stack."""
        async with self._running:
            await self._slots.acquire()
            with ExitStack() as slot:
                slot.callback(self._slots.release)
                yield slot

    def _lend_when_slow(self, slot: ExitStack) -> None:
        late = asyncio.get_running_loop().call_later(SLOW_SECONDS, slot.close)
        slot.callback(late.cancel)

    async def _alone(self, message: dict[str, Any], timeout: float) -> Scored:
        async with self._slot() as slot:
            for process in [process for process in self._idle if process.ended.is_set()]:
                self._drop(process)
            process = self._idle.pop() if self._idle else self._start()
            healthy = False
            try:
                await self._load(process, message["call"])
                self._lend_when_slow(slot)
                answer = await process.ask(message, timeout + GRACE_SECONDS)
                spoilt = answer.get("memory") or "away" in answer  # by connections, say
                healthy = not spoilt and not self._bloated(process)
                return self._parts(answer)
            except Unanswered:
                raise RewardFailed(f"took longer than {timeout:g} s") from None
            finally:
                if healthy and len(self._idle) < self._processes and process in self.alive:
                    self._idle.append(process)
                else:
                    self._drop(process)

    async def _verify(self, message: dict[str, Any], timeout: float) -> Scored:
        async with self._slot() as slot:
            process = self._verifiers
            if process is None or process.ended.is_set():
                memory = min(self._memory, VERIFIER_BYTES)
                process = self._verifiers = self._started(
                    "verifier_main", memory, self._verifier_environment, self._verifier_seconds
                )
            try:
                await self._load(process, message["call"])
                self._lend_when_slow(slot)
                answer = await process.ask(message, timeout + LOAD_SECONDS)
            except Unanswered:
                self._drop(process)
                raise RewardFailed(f"gave no answer within {timeout + LOAD_SECONDS:g} s") from None
            except ProcessEnded:
                self._drop(process)
                raise
            if answer.get("killed"):
                raise ProcessLost(f"{answer['error']}; {since(process.kills)}")
            if "note" in answer:
                self._note(message["call"][0], answer["note"])
            return self._parts(answer)

    def _note(self, name: str, problem: str) -> None:
        """Log that a completion scored 0 by a verifier's failure; of many, ever fewer."""
        self._notes[name] += 1
        count = self._notes[name]
        if count & (count - 1) == 0:
            LOG.warning(
                "%s scored a completion 0, the %d. of this actor: on it the verifier %s",
                name, count, problem,
            )  # fmt: skip

    async def _in_shared(self, message: dict[str, Any], timeout: float) -> Scored:
        async with self._waiting:
            process = self._shared
            if process is None or process.ended.is_set():
                process = self._shared = self._start()
            try:
                await self._load(process, message["call"])
                answer = await process.ask(message, timeout + GRACE_SECONDS)
                if answer.get("memory") or answer.get("again"):
                    raise Unanswered  # the cause may be another call
            except (Unanswered, ProcessEnded):
                self._drop(process)
            else:
                if self._bloated(process) and self._shared is process:
                    self._shared = None
                if process is not self._shared and not process.asked:
                    self._drop(process)
                return self._parts(answer)
        return await self._alone(message, timeout)

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

    def _parts(self, answer: dict[str, Any]) -> Scored:
        if "error" in answer:
            limit = f" (actors.reward_memory_gib = {self._memory / 2**30:g})"
            about = limit if answer.get("memory") else ""
            text = answer["error"] + about + answer.get("where", "")
            if "away" in answer:
                raise ServiceAway(text, retry_after=answer["away"])
            raise RewardFailed(text)
        parts: Scored = answer["parts"]
        return parts

    def _bloated(self, process: RewardProcess) -> bool:
        return process.resident > self._memory / 2

    def _start(self) -> RewardProcess:
        return self._started("process_main", self._memory, self._environment)

    def _started(
        self, module: str, memory: int, environment: Mapping[str, str], *arguments: str
    ) -> RewardProcess:
        """Start a process; ProcessLost if the system has no memory or descriptor left for it."""
        try:
            process = RewardProcess(
                module, memory, self._cores, environment, self._output_limit, *arguments
            )
        except (OSError, RuntimeError) as error:
            raise ProcessLost(f"has no process: its start {describe_error(error)}") from error
        self.alive.add(process)
        return process

    def _drop(self, process: RewardProcess) -> None:
        self.alive.discard(process)
        if self._shared is process:
            self._shared = None
        if self._verifiers is process:
            self._verifiers = None
        if process in self._idle:
            self._idle.remove(process)
        process.close()
