"""The watchdog: reports who waits on whom, for what, since when, once a wait is overdue.

It looks at a run independently of everything else, so that nothing which hangs can silence it.
Overdue waits go to the screen, to `waits.jsonl` with stacks in the logs and to a metric. Then they
end the run, where the recipe wants it; else a learner that is waited for is restarted, and so is an
actor that does not answer, or that is waited for while nothing moves. A run in which nothing at all
moves for longer is ended in any case.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy.config.deploy_config import STALL_FACTOR
from deploy.driver.processes import Processes
from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.observability.stack_dumps import ProcessDump, ProcessLocation, dump, locate
from deploy.observability.waits import ActorHealth, Health, Movement, Wait, Waits
from headway import clock
from headway.atomic_file import atomic_file
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError
from headway.ray_process import call_in
from headway.roles import ProcessName, Role, role_of
from queues.broker.status import BrokerStatus
from weight_sync.progress import allowance

FILE = "waits.jsonl"


def write_durably(file: Path) -> None:
    """Write a few bytes, wait until the disk has them, and delete the file."""
    with atomic_file(file, durable=True) as opened:
        opened.write(b"durable")
    file.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """The watchdog's access to processes and disk, and its deadlines in seconds."""

    dump: Callable[[ProcessLocation], ProcessDump] = dump
    write: Callable[[Path], None] = write_durably
    look_seconds: float = 4.0
    """Seconds between two looks, or less where the deadline is short."""
    answer_seconds: float = 2.5
    """Time after which a process counts as silent."""
    report_seconds: float = 5.0
    """Deadline for writing stacks and `waits.jsonl`."""
    abort_seconds: float = 60.0
    """Time for which a run that is to end waits for stacks first."""
    stall_seconds: float | None = None
    """Longest time in which nothing moves; None: `DeployConfig.stall_seconds`."""


class Watchdog:
    """Watches one run; `save` has the learner save a checkpoint, and returns in time."""

    def __init__(
        self,
        context: RunContext,
        processes: Processes,
        save: Callable[[], Awaitable[None]],
        probes: Probes = Probes(),
    ) -> None:
        self._config, self._directory = context.config, context.directory
        self._screen, self._record, self._jsonl = context.console, context.record, context.jsonl
        self._processes, self._save, self._probes = processes, save, probes
        self._waits = Waits(self._config.deploy.watchdog_seconds)
        self._movement = Movement()
        self._paused: str | None = None
        """The announced reason for which the run waits for a disk."""
        self._newest: BrokerStatus | None = None
        """The broker's last answer; None if it did not give one in time."""
        self._learner_epoch = 0
        """Epoch of the learner by the newest answer that came in time."""
        self._disk_write: asyncio.Task[None] | None = None
        self._writes_until = 0.0
        """Epoch seconds until which a checkpoint that is being written may take."""
        self._locations: dict[str, ProcessLocation] = {}
        self._asked: dict[str, tuple[Any, asyncio.Task[ProcessLocation], float]] = {}
        """The handle, the last request to each process and when it was made, by name."""
        self._silent: dict[str, float] = {}
        self._announced: set[tuple[str, str]] = set()
        self._reports: set[asyncio.Task[None]] = set()
        self.overdue: Sequence[Wait] = ()
        """Overdue waits of the last look; read by the thread of a scrape."""

    async def follow(self) -> None:
        """Look until cancelled.

        Raises RunFailed if a wait is overdue and the recipe ends a run then, or nothing moves.
        """
        pause = min(self._probes.look_seconds, self._config.deploy.watchdog_seconds / 8)
        try:
            while True:
                await self.look()
                await asyncio.sleep(pause)
        finally:
            requests = (task for _, task, _ in self._asked.values())
            for task in filter(None, [*self._reports, *requests, self._disk_write]):
                task.cancel()

    async def look(self) -> None:
        """Look once, and announce waits that are newly overdue or over; raises as `follow`."""
        health = await self._health()
        now = time.monotonic()
        overdue = self._waits.overdue(health, now)
        self.overdue = [*overdue, *_services(health.actors)]
        late = {(wait.who, wait.on): wait for wait in overdue}
        new = [late[key] for key in late if key not in self._announced]
        for who, on in self._announced - late.keys():
            self._screen.say(f"{who} waits on {on} no more")
        known, self._announced = self._announced, set(late)
        if new:
            await self._announce(new)
        idle = self._movement.idle_seconds(health, now)
        self._restart_actors([late[key] for key in known & late.keys()], idle)
        if idle > (self._probes.stall_seconds or self._config.deploy.stall_seconds):
            await self._save()
            raise RunFailed(self._explain_stall(idle))

    def _restart_actors(self, late: Sequence[Wait], idle: float) -> None:
        """Restart actors that hang, unless the run ends; their stacks are taken since a look."""
        deploy = self._config.deploy
        for wait in late:
            hangs = wait.on in self._silent or idle > deploy.watchdog_seconds
            if role_of(wait.on) is Role.ACTOR and hangs and not deploy.watchdog_aborts:
                reason = f"{wait.who} waited {wait.seconds:.0f} s on {wait.on}"
                self._processes.restart_actor(wait.on, reason, wait.seconds)

    def node_of(self, name: str) -> str | None:
        """Return Ray's id of the node where a process is; None while that is not known."""
        location = self._locations.get(name)
        return location.node_id if location else None

    async def _health(self) -> Health:
        actors = self._processes.health()
        learner = self._processes.learner.paused() if actors else asyncio.sleep(0)  # else it starts
        self._newest, paused, _ = await asyncio.gather(
            self._ask_broker(), learner, self._ask_processes()
        )
        if self._newest is not None:
            away = "; ".join(
                f"{wait.who} waits since {_since(wait, clock.now())} on {wait.on} that is away: "
                f"{wait.what}"
                for wait in _services(actors)
            )
            paused = self._newest.paused or paused or away or None
            self._learner_epoch = self._newest.learner[0]
        if (paused is None) != (self._paused is None):
            text = f"paused: {paused}" if paused else "the pause is over; the run goes on"
            self._screen.say(text)
        self._paused = paused
        times = (batch.times for batch in self._record.batches)
        return Health(
            broker=self._newest,
            paused=paused is not None,
            learner_starts=self._processes.learner.starts,
            reward_models_start=self._processes.reward_models_start,
            learner_writes=clock.wall(clock.now()) < self._writes_until,
            learner_saved=self._processes.learner.saved,
            step_seconds=max((t.published_at - t.step_started_at for t in times), default=0.0),
            actors=actors,
            actors_lacking=self._processes.actors_lacking(),
            silent=self._silent,
            disk=self._try_disk(),
            groups_per_batch=self._config.prompts.groups_per_batch,
            checkpoint_every=self._config.learner.checkpoint_every,
        )

    async def _ask_broker(self) -> BrokerStatus | None:
        with suppress(TimeoutError, HeadwayError):
            return await asyncio.wait_for(self._processes.status(), self._probes.answer_seconds)
        return None

    def _explain_stall(self, idle: float) -> str:
        """Describe a run in which nothing moves: its state, every wait, and the last failures."""
        parts = [
            f"nothing moved for {idle:.0f} s, more than {STALL_FACTOR:g} times "
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
        waits = [f"{wait.who} waits on {wait.on} for {wait.what}" for wait in self.overdue]
        parts.append(f"overdue waits: {', '.join(waits) or 'none'}")
        parts.append(f"go on with: headway resume {self._directory.path}")
        return "; ".join(parts)

    def _try_disk(self) -> bool:
        """Return whether the last small file is durable, and begin the next one if so."""
        if self._disk_write is not None and not self._disk_write.done():
            return False

        def write() -> None:
            with suppress(OSError):  # a full disk is reported elsewhere
                self._probes.write(self._directory.path / ".durable")
                self._writes_until = writing_ends(self._directory.checkpoints)

        self._disk_write = asyncio.create_task(run_in_daemon_thread(write, name="disk"))
        return True

    async def _ask_processes(self) -> None:
        """Ask every process for its location; a process that does not answer is asked once."""
        handles = self._processes.handles()
        for name, handle in handles.items():
            known = self._asked.get(name)
            if known is None or known[0] is not handle or known[1].done():
                request = asyncio.create_task(call_in(handle, locate))
                request.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._asked[name] = (handle, request, time.monotonic())
        requests = {name: self._asked[name][1] for name in handles}
        if requests:
            await asyncio.wait(requests.values(), timeout=self._probes.answer_seconds)
        self._silent = {}
        for name, request in requests.items():
            if not request.done() and role_of(name) is not Role.BROKER:  # asked for its status
                self._silent[name] = time.monotonic() - self._asked[name][2]
            elif request.done() and request.exception() is None:
                self._locations[name] = request.result()

    async def _announce(self, late: Sequence[Wait]) -> None:
        """Show overdue waits, begin their report, and end the run if the recipe wants it."""
        at = clock.now()
        texts = [self._sentence(wait, {}, at) for wait in late]
        for text in texts:
            self._screen.say(text)
        report = asyncio.create_task(self._report(late, at))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        if self._config.deploy.watchdog_aborts:
            await asyncio.wait({report}, timeout=self._probes.abort_seconds)
            await self._save()
            raise RunFailed(
                f"{texts[0]}; ended by deploy.watchdog_aborts, go on with: headway resume "
                f"{self._directory.path}"
            )

    async def _report(self, late: Sequence[Wait], at: float) -> None:
        """Write and show overdue waits with stacks; then restart a learner that hangs still."""
        epoch = self._learner_epoch
        names = concerned(late, list(self._locations))
        pending = [run_in_daemon_thread(partial(self._dump, name)) for name in names]
        dumps = dict(zip(names, await asyncio.gather(*pending), strict=True))
        states = [f"{name}: {dumped.states}" for name, dumped in dumps.items()]
        limit = self._probes.report_seconds
        writing = run_in_daemon_thread(lambda: self._write_report(late, dumps, at))
        try:
            stacks = await asyncio.wait_for(writing, limit)
        except TimeoutError:
            stacks = f"no file yet: its disk did not answer within {limit:g} s"
        except Exception as error:  # noqa: BLE001  (what hangs is restarted all the same)
            stacks = f"no file: the report could not be written ({error!r})"
        self._screen.say("; ".join([*states, f"stacks in {stacks}"]))
        if self._config.deploy.watchdog_aborts or not _of_learner(late):
            return
        if hangs := _of_learner(self.overdue):
            wait = hangs[0]
            reason = f"{wait.who} waited {wait.seconds:.0f} s on {wait.on}"
            self._processes.learner.restart_ranks(epoch, reason, wait.seconds)

    def _dump(self, name: str) -> ProcessDump:
        try:
            return self._probes.dump(self._locations[name])
        except Exception as error:  # noqa: BLE001  (what hangs is restarted all the same)
            return ProcessDump(f"its stacks could not be taken ({error!r})", "")

    def _write_report(
        self, late: Sequence[Wait], dumps: Mapping[str, ProcessDump], at: float
    ) -> str:
        """Append a record of each wait to FILE, and write a file of stacks; return its name."""
        number = sum(1 for _ in self._directory.logs.glob("stacks-*.txt"))
        file = self._directory.logs / f"stacks-{number}.txt"
        stacks = str(file.relative_to(self._directory.path))
        parts = [f"== {name}: {dumped.states}\n{dumped.stacks}" for name, dumped in dumps.items()]
        try:
            file.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            stacks = f"no file ({error})"
        records = [
            {"at": at, **asdict(wait), "text": self._sentence(wait, dumps, at), "stacks": stacks}
            for wait in late
        ]
        self._jsonl.write(FILE, records)
        return stacks

    def _sentence(self, wait: Wait, dumps: Mapping[str, ProcessDump], at: float) -> str:
        """Describe an overdue wait in words, with the states of the processes it concerns."""
        text = (
            f"{wait.who} waits on {wait.on} for {wait.what} since {_since(wait, at)}, "
            f"{wait.seconds:.0f} s "
            f"(deploy.watchdog_seconds = {self._config.deploy.watchdog_seconds:g})"
        )
        states = [f"{name}: {dumps[name].states}" for name in concerned([wait], list(dumps))]
        return "; ".join([text, *states])


def _since(wait: Wait, at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at - wait.seconds))


def _services(actors: Mapping[ProcessName, ActorHealth]) -> list[Wait]:
    return [
        Wait(f"{name}: {who}", "a service", cause, seconds=seconds)
        for name, actor in actors.items()
        for who, cause, seconds in actor.outages
    ]


def _of_learner(waits: Sequence[Wait]) -> list[Wait]:
    return [wait for wait in waits if role_of(wait.on) is Role.LEARNER]


def writing_ends(checkpoints: Path) -> float:
    """Return until when (epoch seconds) the bytes of an unfinished checkpoint may take; 0: none."""
    files = [file.stat() for file in checkpoints.glob(".v*.tmp/**/*") if file.is_file()]
    newest = max((file.st_mtime for file in files), default=0.0)
    return newest + allowance(0.0, sum(file.st_size for file in files))


def concerned(waits: Sequence[Wait], known: Sequence[str]) -> list[str]:
    """Return the known processes whose stacks explain waits; for the learner, every rank.

    Example:
        >>> concerned([Wait("broker", "learner", "")], ["broker", "learner-0", "learner-1"])
        ['learner-0', 'learner-1']
    """
    on = {wait.on for wait in waits} | {wait.who for wait in waits if wait.on == "weight update"}
    return [name for name in known if name in on or role_of(name) in on]
