"""The watchdog: reports who waits on whom, for what, since when, once a wait is overdue.

It looks at a run independently of everything else, so that nothing which hangs can silence it.
Overdue waits go to the screen, to `waits.jsonl` with stacks in the logs, to a metric and, where
the recipe sets `deploy.watchdog_aborts`, end the run. A run in which nothing at all moves for three
times `deploy.watchdog_seconds` is ended in any case, unless it waits for space on a disk.
`deploy.observability.waits` defines waits and movement.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from deploy.config import evaluation_schedule
from deploy.config.deploy_config import STALL_FACTOR
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.observability.stack_dumps import ProcessDump, ProcessLocation, dump, locate
from deploy.observability.waits import (
    ActorHealth,
    BrokerHealth,
    Health,
    Movement,
    Overdue,
    Wait,
    Waits,
)
from deploy.runtime.console import Terminal
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from queues.broker.status import BrokerStatus
from queues.errors import QueuesError
from queues.runtime.daemon_thread import run_in_daemon_thread

LOOK_SECONDS = 4.0
"""Seconds between two looks, or less where the deadline is short."""
FILE = "waits.jsonl"
PROBE = ".durable"
"""File by which the disk is tried."""


def write_durably(file: Path) -> None:
    """Write a few bytes, wait until the disk has them, and delete the file."""
    with file.open("wb") as opened:
        opened.write(b"durable")
        opened.flush()
        os.fsync(opened.fileno())
    file.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """The watchdog's access to processes and disk, and its deadlines in seconds."""

    dump: Callable[[ProcessLocation], ProcessDump] = dump
    write: Callable[[Path], None] = write_durably
    look_seconds: float = LOOK_SECONDS
    answer_seconds: float = 2.5
    """After which a process counts as silent."""
    report_seconds: float = 5.0
    """For writing stacks and `waits.jsonl`."""
    abort_seconds: float = 60.0
    """For which a run that is to end waits for stacks first."""
    stall_factor: float = STALL_FACTOR
    """Times deploy.watchdog_seconds: how long nothing may move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """The processes of a run as the watchdog reaches them."""

    status: Callable[[], Awaitable[BrokerStatus]]
    """Asks the broker for its status."""
    learner_paused: Callable[[], Awaitable[str | None]]
    """Asks the learner why it waits for space on a disk, if it does."""
    actors: Callable[[], Mapping[str, ActorHealth]]
    """Returns the health of each rollout actor that has started."""
    handles: Callable[[], Mapping[str, Any]]
    """Returns the present Ray handles of the processes by name."""
    save: Callable[[], Awaitable[None]]
    """Has the learner save a checkpoint; returns in time, whether it did or not."""


class Watchdog:
    """Watches one run.

    Args:
        config: The recipe, with deploy.watchdog_seconds and deploy.watchdog_aborts.
        directory: Gets `waits.jsonl`, and stacks in its logs.
        screen: Shows overdue waits.
        record: Has the last weight update that failed.
        run: The processes of the run.
        probes: Access to processes and disk, and deadlines.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        screen: Terminal,
        record: Record,
        run: WatchedRun,
        probes: Probes = Probes(),
    ) -> None:
        self._config, self._directory = config, directory
        self._screen, self._record = screen, record
        self._run, self._probes = run, probes
        self._waits = Waits(config.deploy.watchdog_seconds)
        self._movement = Movement()
        self._paused: str | None = None
        """Why the run waits for space on a disk, as announced."""
        self._newest: BrokerStatus | None = None
        """The broker's last answer; None if it did not give one in time."""
        self._durable = threading.Event()
        self._durable.set()
        self._locations: dict[str, tuple[Any, ProcessLocation]] = {}
        """The handle and the location of each process that has answered, by name."""
        self._asked: dict[str, tuple[Any, asyncio.Task[ProcessLocation]]] = {}
        """The handle and the last request to each process, by name."""
        self._silent: Sequence[str] = ()
        self._announced: set[tuple[str, str]] = set()
        self._reports: set[asyncio.Task[None]] = set()
        """Reports with stacks that are being written while the next looks go on."""
        self.overdue: Sequence[Overdue] = ()
        """As of the last look; read by the thread of a scrape."""

    async def follow(self) -> None:
        """Look until cancelled.

        Raises:
            RunFailed: A wait is overdue and the recipe ends a run then, or nothing moves.
        """
        pause = min(self._probes.look_seconds, self._config.deploy.watchdog_seconds / 8)
        try:
            while True:
                await self.look()
                await asyncio.sleep(pause)
        finally:
            for task in [*self._reports, *(task for _, task in self._asked.values())]:
                task.cancel()

    async def look(self) -> None:
        """Look once, and announce waits that are newly overdue or over.

        Raises:
            RunFailed: As `follow`.
        """
        health = await self._health()
        now = time.monotonic()
        self.overdue = self._waits.overdue(health, now)
        late = {(overdue.wait.who, overdue.wait.on): overdue for overdue in self.overdue}
        new = [late[key] for key in late if key not in self._announced]
        for who, on in self._announced - late.keys():
            self._screen.say(f"{who} waits on {on} no more")
        self._announced = set(late)
        if new:
            await self._announce(new)
        idle = self._movement.idle_seconds(health, now)
        if idle > self._probes.stall_factor * self._config.deploy.watchdog_seconds:
            await self._run.save()
            raise RunFailed(self._explain_stall(idle))

    def node_of(self, name: str) -> str | None:
        """Return Ray's id of the node where a process is; None while that is not known."""
        known = self._locations.get(name)
        return known[1].node_id if known else None

    async def _health(self) -> Health:
        actors = self._run.actors()
        self._newest, paused, _ = await asyncio.gather(
            self._ask_broker(), self._ask_learner(working=bool(actors)), self._ask_processes()
        )
        if self._newest is not None:
            paused = self._newest.paused or paused
        if (paused is None) != (self._paused is None):
            self._screen.say(f"paused: {paused}" if paused else "there is room again: goes on")
        self._paused = paused
        broker = broker_health(self._newest, paused=paused is not None) if self._newest else None
        return Health(
            broker=broker,
            actors=actors,
            silent=self._silent,
            disk=self._try_disk(),
            groups_per_batch=self._config.prompts.groups_per_batch,
        )

    async def _ask_broker(self) -> BrokerStatus | None:
        with suppress(TimeoutError, QueuesError):
            async with asyncio.timeout(self._probes.answer_seconds):
                return await self._run.status()
        return None

    async def _ask_learner(self, *, working: bool) -> str | None:
        """Return why the learner waits for space on a disk; None where it does not, or starts."""
        return await self._run.learner_paused() if working else None

    def _explain_stall(self, idle: float) -> str:
        """Describe a run in which nothing moves: its state, every wait, and the last failures."""
        parts = [
            f"nothing moved for {idle:.0f} s, more than {self._probes.stall_factor:g} times "
            f"deploy.watchdog_seconds = {self._config.deploy.watchdog_seconds:g}"
        ]
        if (status := self._newest) is None:
            parts.append("the broker does not answer")
        else:
            parts += [
                f"version {status.version}, groups {dict(status.depth)}, engines serve "
                f"{dict(status.engines)}",
                f"unfinished evaluations: {', '.join(status.evaluations) or 'none'}",
                f"last failure: {status.last_error or 'none'}",
            ]
        failed = [update.error for update in self._record.swaps if update.error]
        parts.append(f"last failed weight update: {failed[-1] if failed else 'none'}")
        waits = [f"{w.who} waits on {w.on} for {w.what}" for w in (o.wait for o in self.overdue)]
        parts.append(f"overdue waits: {', '.join(waits) or 'none'}")
        parts.append(f"go on with: headway resume {self._directory.path}")
        return "; ".join(parts)

    def _try_disk(self) -> bool:
        """Return whether the last small file is durable, and begin the next one if so."""
        if not self._durable.is_set():
            return False
        self._durable.clear()
        file = self._directory.path / PROBE
        threading.Thread(target=self._write_probe, args=(file,), name="disk", daemon=True).start()
        return True

    def _write_probe(self, file: Path) -> None:
        """Write in a thread that nobody waits for: it may hang as long as the disk does."""
        with suppress(OSError):  # a full disk is reported elsewhere
            self._probes.write(file)
        self._durable.set()

    async def _ask_processes(self) -> None:
        """Ask every process for its location; a process that does not answer is asked once."""
        handles = self._run.handles()
        for name, handle in handles.items():
            known = self._asked.get(name)
            if known is None or known[0] is not handle or known[1].done():
                request = asyncio.create_task(_locate(handle))
                request.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._asked[name] = (handle, request)
        requests = {name: self._asked[name][1] for name in handles}
        if requests:
            await asyncio.wait(requests.values(), timeout=self._probes.answer_seconds)
        for name, request in requests.items():
            if request.done() and request.exception() is None:
                self._locations[name] = (handles[name], request.result())
        reported = {"broker", *self._run.actors()}  # their health shows whether they answer
        self._silent = [
            name for name, task in requests.items() if not (task.done() or name in reported)
        ]

    async def _announce(self, late: Sequence[Overdue]) -> None:
        """Show overdue waits, begin their report, and end the run if the recipe wants it."""
        at = time.time()
        deadline = self._config.deploy.watchdog_seconds
        texts = [sentence(overdue, {}, at=at, deadline=deadline) for overdue in late]
        for text in texts:
            self._screen.say(escape(text))
        report = asyncio.create_task(self._report(late, at))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        if self._config.deploy.watchdog_aborts:
            await asyncio.wait({report}, timeout=self._probes.abort_seconds)
            await self._run.save()
            raise RunFailed(
                f"{texts[0]}; ended by deploy.watchdog_aborts, go on with: headway resume "
                f"{self._directory.path}"
            )

    async def _report(self, late: Sequence[Overdue], at: float) -> None:
        """Write overdue waits with stacks; show the file, or that the disk hangs."""
        names = concerned([overdue.wait for overdue in late], list(self._locations))
        pending = (
            run_in_daemon_thread(partial(self._probes.dump, self._locations[name][1]))
            for name in names
        )
        dumps = dict(zip(names, await asyncio.gather(*pending), strict=True))
        states = [f"{name}: {dumped.states}" for name, dumped in dumps.items()]
        limit = self._probes.report_seconds
        try:
            async with asyncio.timeout(limit):
                stacks = await run_in_daemon_thread(lambda: self._write_report(late, dumps, at))
        except TimeoutError:
            stacks = f"no file yet: its disk did not answer within {limit:g} s"
        self._screen.say(escape("; ".join([*states, f"stacks in {stacks}"])))

    def _write_report(
        self, late: Sequence[Overdue], dumps: Mapping[str, ProcessDump], at: float
    ) -> str:
        """Append a record of each wait to FILE, and write a file of stacks; return its name."""
        stacks, deadline = self._write_stacks(dumps), self._config.deploy.watchdog_seconds
        with suppress(OSError):
            self._directory.append(
                FILE,
                [
                    {
                        "at": at,
                        "who": overdue.wait.who,
                        "on": overdue.wait.on,
                        "what": overdue.wait.what,
                        "seconds": overdue.seconds,
                        "text": sentence(overdue, dumps, at=at, deadline=deadline),
                        "stacks": stacks,
                    }
                    for overdue in late
                ],
            )
        return stacks

    def _write_stacks(self, dumps: Mapping[str, ProcessDump]) -> str:
        number = sum(1 for _ in self._directory.logs.glob("stacks-*.txt"))
        file = self._directory.logs / f"stacks-{number}.txt"
        text = "\n".join(
            f"== {name}: {dumped.states}\n{dumped.stacks}" for name, dumped in dumps.items()
        )
        try:
            file.write_text(text)
        except OSError as error:
            return f"no file ({error})"
        return str(file.relative_to(self._directory.path))


async def _locate(handle: Any) -> ProcessLocation:
    location: ProcessLocation = await handle.__ray_call__.remote(locate)
    return location


def broker_health(status: BrokerStatus, *, paused: bool) -> BrokerHealth:
    """Return the part of a broker's status from which waits follow."""
    depth = status.depth
    return BrokerHealth(
        version=status.version,
        steps=status.steps,
        queued=depth["queued"],
        leased=depth["leased"],
        ready=depth["ready"],
        taken=depth["taken"],
        live=status.live,
        window=status.window,
        waits_for=status.waits_for,
        engines=status.engines,
        accepted=status.accepted,
        scores_first=evaluation_schedule.scores_first(status.evaluations),
        paused=paused,
    )


def concerned(waits: Sequence[Wait], known: Sequence[str]) -> list[str]:
    """Return the known processes whose stacks explain waits; for the learner, every rank.

    Example:
        >>> concerned([Wait("broker", "learner", "")], ["broker", "learner-0", "learner-1"])
        ['learner-0', 'learner-1']
    """
    on = {wait.on for wait in waits} | {wait.who for wait in waits if wait.on == "weight update"}
    return [name for name in known if name in on or name.rpartition("-")[0] in on]


def sentence(
    overdue: Overdue, dumps: Mapping[str, ProcessDump], *, at: float, deadline: float
) -> str:
    """Describe an overdue wait in words, with the states of the processes that it concerns."""
    wait = overdue.wait
    since = time.strftime("%H:%M:%S", time.localtime(at - overdue.seconds))
    text = (
        f"{wait.who} waits on {wait.on} for {wait.what} since {since}, {overdue.seconds:.0f} s "
        f"(deploy.watchdog_seconds = {deadline:g})"
    )
    states = [f"{name}: {dumps[name].states}" for name in concerned([wait], list(dumps))]
    return "; ".join([text, *states])
