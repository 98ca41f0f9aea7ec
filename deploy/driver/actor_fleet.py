"""Keeps as many rollout actors at work as are asked for, and changes their number in a live run.

    headway scale ─▶ does it fit? ─▶ recorded ─▶ actors join or leave ─▶ the answer
    a node is lost or drained ─▶ its actors leave ─▶ they join again where resources are free
    others wait for a node ─▶ actors that joined later leave, where that helps
    resources are free ─▶ another actor joins, up to actors.max_count

An actor that leaves hands over what it samples, so that others go on with it. Numbers are used
again: the actor that joins next has the lowest number that is free.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from actors.ray_actor import ActorSpec, create_actor
from deploy.cluster.placement_group import Reservation, staying_nodes
from deploy.config.evaluation_schedule import EVALUATOR, evaluator
from deploy.driver.actor_supervisor import ActorSupervisor
from deploy.driver.named_tasks import named
from deploy.driver.run_context import RunContext
from deploy.storage import scaling
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError, InputError
from headway.ray_process import node_of
from headway.roles import Role
from queues.errors import QueueClosed
from queues.ray_broker import BrokerClient
from weight_sync.ray_broadcaster import BroadcasterClient

GIVE_SECONDS = 10.0
"""Seconds that others have to take what actors gave back, before more of them leave."""
HURRY_SECONDS = 8.0
"""Deadline of an actor to hand over what it samples, on a node that is lost or drained."""
PATIENT_SECONDS = 60.0
"""The same for an actor that leaves since fewer are wanted: the broker may be restarted."""


class ActorFleet:
    """The actors of a run: those that work, and those that have left.

    `spec_of` returns what an actor is made from, given its number and how many there are. No actor
    joins while the learner starts.
    """

    look_seconds = 1.0
    """Seconds between two looks at requests, nodes and free resources."""

    def __init__(
        self,
        context: RunContext,
        spec_of: Callable[[int, int], ActorSpec],
        reservation: Reservation,
        queues: tuple[BrokerClient, BroadcasterClient],
        *,
        learner_starts: Callable[[], bool],
    ) -> None:
        self._context, self._spec_of, self._reservation = context, spec_of, reservation
        self._broker, self._broadcaster = queues
        self._learner_starts = learner_starts
        self._shared = context.config.deploy.ray_address != "local"
        """True on a cluster that others may use too, whose nodes come and go."""
        config = context.config.actors
        self.count = config.count
        """The number of actors that is asked for."""
        self._least, self._most = config.min_count, config.max_count or 0
        self._resized = False
        """True while broker and broadcaster know of another number than the recipe's."""
        self._printed: str | None = None
        """Last text on actors that wait for resources."""
        self.actors: list[ActorSupervisor] = []
        """All that there ever were, by number."""
        for number in range(self.count):
            self._supervisor(number).left = reservation.waits(Role.ACTOR, number)
        self._working: dict[asyncio.Task[None], ActorSupervisor] = {}
        """The actors that work, start or leave, by the task that ends with them."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._gave_back_at = -math.inf
        """When actors left last so that others get what they held, on the loop's clock."""

    @property
    def active(self) -> list[ActorSupervisor]:
        """The actors that work or start."""
        return [actor for actor in self.actors if not (actor.left or actor.given_up)]

    @property
    def lacking(self) -> int:
        """The number of actors that would work if there were resources for them."""
        given_up = sum(actor.given_up for actor in self.actors)
        lacking = max(1, self.count - given_up) - len(self.active)
        return max(lacking, int(self._evaluator_is_away))

    @property
    def _evaluator_is_away(self) -> bool:
        """True if no actor evaluates now, although one is to do nothing else."""
        pinned = evaluator(self._context.config.heldout) is not None
        return pinned and self.actors[EVALUATOR].left

    async def run(self) -> None:
        """Keep the actors at work until the run is over; raise RunFailed if a needed one fails."""
        for actor in self.active:
            self._begin(actor)
        looking, over = named("actors", self._follow()), False
        try:
            while self._working or not over:
                tasks = {*self._working, *(() if over else (looking,))}
                ended, _ = await asyncio.wait(
                    tasks, timeout=self.look_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    task.result()
                    actor = self._working[task]
                    if actor.left or actor.given_up:
                        await self._reserve(self._reservation.remove, actor.number)
                    else:
                        over = True
                    del self._working[task]  # frees its number
                if over or (not self._working and await self._is_over(self.actors[0])):
                    over = True
                    looking.cancel()
                    await self._end_starts()
        finally:
            tasks = {looking, *self._working, *self._leaving}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_starts(self) -> None:
        """Have actors leave that would start only to hear that the run is over."""
        starting = [a for a in self._working.values() if a.health is None and not a.left]
        if starting and await self._is_over(starting[0]):
            for actor in starting:
                self._leave(actor)

    async def _is_over(self, idle: ActorSupervisor) -> bool:
        """Ask the broker whether the run is over, by releasing an engine that holds no lease."""
        try:
            await self._broker.release(idle.engine_id)
        except QueueClosed:
            return True
        return False

    async def _follow(self) -> None:
        directory = self._context.directory
        while True:
            for file, asked in await run_in_daemon_thread(lambda: scaling.requests(directory)):
                await self._answer(file, asked)
            # After the loss of a node, and for ranks of the learner, what is free may be needed.
            leaves = self._shared and await self._leave_nodes()
            if self._reservation.awaited:
                await self._give_back()
            elif not (leaves or self._learner_starts()):
                await self._fill()
            await self._resize_queues()
            await asyncio.sleep(self.look_seconds)

    async def _answer(self, file: Path, asked: int) -> None:
        """Scale to the number that a request asks for, or refuse it, and answer."""
        before = self.count
        refused = self._refusal(asked) or await self._scale(asked)
        row = {"asked": asked, "before": before, "refused": refused}
        outcome = f"refused: {refused}" if refused else f"{before} → {asked}"
        self._context.console.say(f"actors, as `headway scale` asks: {outcome}")
        await run_in_daemon_thread(partial(scaling.answer, self._context.jsonl, file, row))

    def _refusal(self, asked: int) -> str | None:
        """Return why the number of actors cannot change now, if so."""
        restarts = self._learner_starts() or self._reservation.awaited
        text = "the learner is being restarted, or reward models are, and may need the resources"
        refused = self._shared and asked > self.count and restarts
        return f"{text}; try again later" if refused else None

    async def _scale(self, asked: int) -> str | None:
        """Change the number of actors and record it; return the reason if that cannot be."""
        directory = self._context.directory
        away = int(self._evaluator_is_away)  # it comes back by itself
        new = self._free_numbers(asked - away - len(self.active), {EVALUATOR} if away else ())
        try:
            # A limit below the new number would be refused, and ends with this request anyway.
            keys = ("count", "max_count") if self._most else ("count",)
            settings = [f"actors.{key}={asked}" for key in keys]
            config = await run_in_daemon_thread(
                lambda: directory.config(settings).updated(actors={"max_count": None})
            )
            if new and (lacks := await self._reserve(self._reservation.lacking, new, asked)):
                return "; ".join(lacks)
            for number in new:
                if not await self._reserve(self._reservation.add, number):
                    raise InputError("others took the resources that were free")
            await run_in_daemon_thread(lambda: directory.store_recipe(config))
        except (InputError, OSError) as error:
            for number in new:
                await self._reserve(self._reservation.remove, number)
            return str(error)
        self.count, self._most = asked, 0
        for actor in self.actors:
            if actor.given_up:
                actor.given_up, actor.left = False, True
        for number in new:
            self._join(number)
        for actor in sorted(self.active, key=lambda actor: actor.number)[asked - away :]:
            self._leave(actor)
        return None

    async def _leave_nodes(self) -> bool:
        """Have actors leave nodes that are lost or that Ray drains; return True if any has to."""
        staying, leaves = await run_in_daemon_thread(staying_nodes), False
        for actor in self.active:
            handle = actor.handle
            node = self._reservation.node(Role.ACTOR, actor.number)
            if node is None and handle is not None:
                node = await run_in_daemon_thread(partial(node_of, handle))
            if staying and node is not None and node not in staying:  # empty: Ray does not know
                self._context.console.say(f"{actor.name} leaves its node, which is lost or drained")
                self._leave(actor, HURRY_SECONDS)
                leaves = True
        return leaves

    async def _give_back(self) -> None:
        """Have the last actors leave, as far as others then get what they wait for."""
        now = asyncio.get_running_loop().time()
        if now < self._gave_back_at + GIVE_SECONDS:
            return
        pinned = evaluator(self._context.config.heldout) is not None
        least = max(self._least or self.count, 2 if pinned else 1)
        active = sorted(self.active, key=lambda actor: -actor.number)
        spare = [actor.number for actor in active[: max(0, len(active) - least)]]
        given = await self._reserve(self._reservation.to_give_back, spare)
        for actor in active:
            if actor.number in given:
                self._context.console.say(f"{actor.name} gives back its node, which others need")
                self._leave(actor, HURRY_SECONDS)
                self._gave_back_at = now

    async def _fill(self) -> None:
        """Have actors join as far as resources are free, one that only evaluates before others."""
        given_up = {actor.number for actor in self.actors if actor.given_up}
        while self.lacking or len(self.active) < self._most - len(given_up):
            [number] = self._free_numbers(1, given_up)
            if self._evaluator_is_away and number != EVALUATOR:
                break  # it still leaves a node
            if not await self._reserve(self._reservation.add, number):
                break
            self._join(number)
        text = f"{self.lacking} actor(s) wait for free resources" if self.lacking else None
        if text is not None and text != self._printed:
            self._context.console.say(text)
        self._printed = text

    async def _resize_queues(self) -> None:
        """Tell broker and broadcaster how many engines there are, again and again: they forget."""
        config, engines = self._context.config, max(1, len(self.active))
        others = engines != config.actors.count
        if not others and not self._resized:
            return
        with suppress(HeadwayError):  # others notice that one is lost
            await self._broker.resize(config.window(engines))
            await self._broadcaster.resize(engines)
            self._resized = others

    def _free_numbers(self, count: int, given_up: Collection[int] = ()) -> list[int]:
        """Return the lowest numbers of actors that do not work, but those that are given up."""
        taken = {actor.number for actor in self._working.values()}.union(given_up)
        free = (number for number in range(len(taken) + max(0, count)) if number not in taken)
        return [*free][: max(0, count)]

    def _join(self, number: int) -> None:
        actor = self._supervisor(number)
        actor.join()
        self._context.console.say(f"{actor.name} joins")
        self._begin(actor)

    def _begin(self, actor: ActorSupervisor) -> None:
        actor.left = False
        self._working[named(actor.name, actor.run())] = actor

    def _leave(self, actor: ActorSupervisor, seconds: float = PATIENT_SECONDS) -> None:
        actor.left = True
        task = asyncio.create_task(actor.leave(seconds))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _supervisor(self, number: int) -> ActorSupervisor:
        """Return the supervisor of an actor, which is made if there never was one."""
        if number == len(self.actors):
            actor = ActorSupervisor(
                self._context,
                self._spec_of(number, max(self.count, number + 1)),
                lambda: (len(self.active), self._least or self.count),
                lambda spec: create_actor(spec, **self._reservation.options(Role.ACTOR, number)),
            )
            self.actors.append(actor)
        return self.actors[number]

    async def _reserve(self, call: Callable[..., Any], *arguments: int | Sequence[int]) -> Any:
        """Call a method of the reservation, which asks Ray and may wait, for this role."""
        return await run_in_daemon_thread(partial(call, Role.ACTOR, *arguments))
