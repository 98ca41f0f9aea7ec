"""Names who waits on whom for what since when, once it lasts too long, with stacks.

Looks at a run beside everything else, so that nothing which hangs can keep it from speaking. What
is overdue goes to the screen, to `waits.jsonl`, to a metric and, where the recipe says so, ends the
run. What a wait is, is `deploy.observability.waits`.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from deploy.config import evaluation_schedule as heldout
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.observability.stack_dumps import Found, Place, look, place_of_actor
from deploy.observability.waits import ActorSigns, BrokerSigns, Health, Overdue, Wait, Waits
from deploy.runtime.console import Terminal
from queues.runtime.daemon_thread import run_in_daemon_thread
from deploy.storage.run_directory import RunDirectory
from queues.broker.status import BrokerStatus
from queues.errors import QueuesError

LOOK_SECONDS = 4.0
"""Between two looks, or less where the deadline is short."""
ANSWER_SECONDS = 2.5
"""Deadline of an answer, after which the process is said not to answer."""
WRITE_SECONDS = 5.0
"""Deadline of writing down what was said."""
NOTE_SECONDS = 60.0
"""How long a run that is to end waits for stacks before."""
FILE = "waits.jsonl"
PROBE = ".durable"
"""File by which the disk is tried."""


class Watchdog:
    """Watches one run.

    Args:
        config: Its recipe: deploy.watchdog_seconds and deploy.watchdog_aborts.
        directory: Gets `waits.jsonl`, and stacks in its logs.
        screen: Says what is overdue.
        status: Asks the broker.
        actors: What each rollout actor that works shows of itself.
        handles: Ray handles of the processes by name, as they are now.
        save: Has the learner save a checkpoint; returns in time, whether it did or not.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        screen: Terminal,
        *,
        status: Callable[[], Awaitable[BrokerStatus]],
        actors: Callable[[], Mapping[str, ActorSigns]],
        handles: Callable[[], Mapping[str, Any]],
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self._config, self._directory, self._screen = config, directory, screen
        self._status, self._actors, self._handles, self._save = status, actors, handles, save
        self._waits = Waits(config.deploy.watchdog_seconds)
        self._durable = threading.Event()
        self._durable.set()
        self._places: dict[str, tuple[Any, Place]] = {}
        self._asked: dict[str, tuple[Any, asyncio.Task[Place]]] = {}
        """Of every process: where it is."""
        self._silent: Sequence[str] = ()
        self._told: set[tuple[str, str]] = set()
        self._noting: set[asyncio.Task[None]] = set()
        """What was said is written down with stacks, while the next looks go on."""
        self.overdue: Sequence[Overdue] = ()
        """As of the last look; read by the thread of a scrape."""

    async def follow(self) -> None:
        """Looks until it is cancelled.

        Raises:
            RunFailed: Something is overdue, and the recipe ends a run then.
        """
        try:
            while True:
                await self.look()
                await asyncio.sleep(min(LOOK_SECONDS, self._config.deploy.watchdog_seconds / 8))
        finally:
            for task in [*self._noting, *(task for _, task in self._asked.values())]:
                task.cancel()

    async def look(self) -> None:
        """Looks once, and says what is new.

        Raises:
            RunFailed: As `follow`.
        """
        await self._find_places()
        signs = await self._signs()
        self.overdue = self._waits.overdue(signs, time.monotonic())
        now = {(late.wait.who, late.wait.on) for late in self.overdue}
        new = [late for late in self.overdue if (late.wait.who, late.wait.on) not in self._told]
        for who, on in self._told - now:
            self._screen.say(f"{who} waits on {on} no more")
        self._told = now
        if new:
            await self._tell(new)

    async def _signs(self) -> Health:
        broker = None
        with suppress(TimeoutError, QueuesError):
            async with asyncio.timeout(ANSWER_SECONDS):
                broker = broker_signs(await self._status())
        return Health(
            broker=broker,
            actors=self._actors(),
            silent=self._silent,
            disk=self._try_disk(),
            groups_per_batch=self._config.prompts.groups_per_batch,
        )

    def _try_disk(self) -> bool:
        """Whether the last small file is durable; begins with the next one if so."""
        if not self._durable.is_set():
            return False
        self._durable.clear()
        file = self._directory.path / PROBE
        threading.Thread(target=self._write, args=(file,), name="disk", daemon=True).start()
        return True

    def _write(self, file: Path) -> None:
        """In a thread that nobody waits for: it may hang as long as the disk does."""
        with suppress(OSError):  # a disk that is full is told elsewhere
            write_durably(file)
        self._durable.set()

    async def _find_places(self) -> None:
        """Asks every process where it is, and so whether it answers; one that does not, once."""
        handles = self._handles()
        for name, handle in handles.items():
            known = self._asked.get(name)
            if known is None or known[0] is not handle or known[1].done():
                asked = asyncio.create_task(_place(handle))
                asked.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._asked[name] = (handle, asked)
        tasks = {name: self._asked[name][1] for name in handles}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=ANSWER_SECONDS)
        for name, task in tasks.items():
            if task.done() and task.exception() is None:
                self._places[name] = (handles[name], task.result())
        own = {"broker", *self._actors()}  # those have signs of their own
        self._silent = [name for name, task in tasks.items() if not (task.done() or name in own)]

    def node_of(self, name: str) -> str | None:
        """Ray's id of the node where a process is; None while that is not known."""
        found = self._places.get(name)
        return found[1].node_id if found else None

    async def _tell(self, late: Sequence[Overdue]) -> None:
        """Says what is overdue, has it written down, and ends the run where it is to end."""
        at = time.time()
        deadline = self._config.deploy.watchdog_seconds
        texts = [sentence(each, {}, at=at, deadline=deadline) for each in late]
        for text in texts:
            self._screen.say(escape(text))
        noting = asyncio.create_task(self._note(late, at))
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)
        if self._config.deploy.watchdog_aborts:
            await asyncio.wait({noting}, timeout=NOTE_SECONDS)
            await self._save()
            raise RunFailed(
                f"{texts[0]}; ended by deploy.watchdog_aborts, go on with: headway resume "
                f"{self._directory.path}"
            )

    async def _note(self, late: Sequence[Overdue], at: float) -> None:
        """Writes down what is overdue, with stacks; says where, or that the disk hangs."""
        names = concerned([each.wait for each in late], list(self._places))
        looks = (run_in_daemon_thread(partial(look, self._places[name][1])) for name in names)
        found = dict(zip(names, await asyncio.gather(*looks), strict=True))
        states = "; ".join(f"{name}: {each.states}" for name, each in found.items())
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                stacks = await run_in_daemon_thread(lambda: self._write_down(late, found, at))
        except TimeoutError:
            stacks = f"no file yet: its disk did not answer within {WRITE_SECONDS:g} s"
        self._screen.say(escape("; ".join([*([states] if states else []), f"stacks in {stacks}"])))

    def _write_down(self, late: Sequence[Overdue], found: Mapping[str, Found], at: float) -> str:
        """A row for each in FILE, and their stacks; in a thread that may hang with the disk."""
        stacks, deadline = self._write_stacks(found), self._config.deploy.watchdog_seconds
        with suppress(OSError):
            self._directory.append(
                FILE,
                [
                    {
                        "at": at,
                        "who": each.wait.who,
                        "on": each.wait.on,
                        "what": each.wait.what,
                        "seconds": each.seconds,
                        "text": sentence(each, found, at=at, deadline=deadline),
                        "stacks": stacks,
                    }
                    for each in late
                ],
            )
        return stacks

    def _write_stacks(self, found: Mapping[str, Found]) -> str:
        """A file in the logs; its name."""
        number = sum(1 for _ in self._directory.logs.glob("stacks-*.txt"))
        file = self._directory.logs / f"stacks-{number}.txt"
        text = "\n".join(f"== {name}: {each.states}\n{each.stacks}" for name, each in found.items())
        try:
            file.write_text(text)
        except OSError as error:
            return f"no file ({error})"
        return str(file.relative_to(self._directory.path))


async def _place(handle: Any) -> Place:
    place: Place = await handle.__ray_call__.remote(place_of_actor)
    return place


def broker_signs(status: BrokerStatus) -> BrokerSigns:
    """What waits are found in."""
    depth = status.depth
    return BrokerSigns(
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
        scores_first=heldout.scores_first(status.evaluations),
        paused=status.paused is not None,
    )


def concerned(waits: Sequence[Wait], known: Sequence[str]) -> list[str]:
    """Processes whose stacks tell why: who is waited for; of the learner every rank.

    Example:
        >>> concerned([Wait("broker", "learner", "")], ["broker", "learner-0", "learner-1"])
        ['learner-0', 'learner-1']
    """
    on = {wait.on for wait in waits} | {wait.who for wait in waits if wait.on == "weight update"}
    return [name for name in known if name in on or name.rpartition("-")[0] in on]


def sentence(late: Overdue, found: Mapping[str, Found], *, at: float, deadline: float) -> str:
    """One wait in words, with the states of who is waited for."""
    wait = late.wait
    since = time.strftime("%H:%M:%S", time.localtime(at - late.seconds))
    text = (
        f"{wait.who} waits on {wait.on} for {wait.what} since {since}, {late.seconds:.0f} s "
        f"(deploy.watchdog_seconds = {deadline:g})"
    )
    states = [
        f"{name}: {found[name].states}" for name in concerned([wait], list(found)) if name in found
    ]
    return "; ".join([text, *states])


def write_durably(file: Path) -> None:
    """Writes a few bytes and waits until the disk has them."""
    with file.open("wb") as opened:
        opened.write(b"durable")
        opened.flush()
        os.fsync(opened.fileno())
    file.unlink()
