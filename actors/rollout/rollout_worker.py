"""The loop of an actor: leases groups, has their rollouts run, and puts the results.

    first weights ─▶ lease for as many rollouts as have room ─▶ one task a group:
                                                                  its rollouts at once ─▶ put
                                                                        └─ one failed ──▶ fail
    (a greedy rollout that a lease asks for beside its group runs with them, and is not put)
    every few seconds: heartbeat of all groups held ─▶ abort those that are no longer ours
                       rollouts that have finished before the others of their group ─▶ save

Who waits on whom: the loop on the first version (`on_version`), then on room (a rollout's end),
then on the broker, which grants what admission allows. A worker that only evaluates makes
`on_version` wait, and so the next version, until nothing is left to evaluate at this one. It ends
when the run is over (QueueClosed), which aborts what is running, or at `stop`, which interrupts it
and saves what it has sampled: the broker gives that to whoever leases the group next. An engine
that died, or a broker that is lost, ends it with that error.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from actors.errors import ActorsError, InputError, RolloutFailed
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.failures import root_error
from actors.rollout.partial_group import PartialGroup
from queues.errors import QueueClosed, SchemaError
from queues.protocols import WorkQueue
from queues.records import (
    BASELINE_REWARD,
    FinishReason,
    Lease,
    Purpose,
    PutStatus,
    Rollout,
    RolloutGroup,
)
from queues.schema import encode

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Longest wait for a lease before `stop` and the room are looked at again."""
HAND_OVER_SECONDS = 5.0
"""How long interrupted rollouts may take to be saved, and those that just end to be put."""


class RolloutWorker:
    """Keeps one engine full of rollouts.

    Args:
        tally: Counts what is done; its engine holds the leases.
        work: The broker.
        run_episode: Makes one rollout of a lease, given the sample's index, and what an earlier
            attempt has sampled of it.
        interrupt: Ends every rollout as it is (`RolloutEngine.interrupt`).
        max_concurrent_rollouts: Room, in rollouts; a group begins as a whole, and each of its
            rollouts gives its place back when it ends.
        largest_group: Most rollouts that a lease may be for, a baseline included.
        heartbeat_seconds: How often leases are renewed.
        purpose: Of what it leases; None leases for either.
        pinned_seconds: Longest that a version is kept from a worker that only evaluates.

    Raises:
        InputError: Not even one group has room.
    """

    def __init__(
        self,
        tally: ActorStatistics,
        work: WorkQueue,
        run_episode: Callable[[Lease, int, Rollout | None], Awaitable[Rollout]],
        *,
        interrupt: Callable[[], Awaitable[None]],
        max_concurrent_rollouts: int,
        largest_group: int,
        heartbeat_seconds: float,
        purpose: Purpose | None = None,
        pinned_seconds: float = 600.0,
    ) -> None:
        if max_concurrent_rollouts < largest_group:
            raise InputError(
                f"actors.max_concurrent_rollouts = {max_concurrent_rollouts} must be at least "
                f"{largest_group}, the rollouts of a group: none could ever be leased"
            )
        self._tally = tally
        self._engine_id = tally.engine_id
        self._occupancy = tally.occupancy
        self._work = work
        self._run_episode, self._interrupt = run_episode, interrupt
        self._slots = max_concurrent_rollouts
        self._largest_group = largest_group
        self._heartbeat_seconds = heartbeat_seconds
        self._purpose = purpose
        self._pinned_seconds = pinned_seconds
        self._evaluated: asyncio.Future[None] | None = None
        """Done when nothing is left to evaluate at the version; `on_version` waits for it."""
        self._held: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._places: dict[tuple[str, int], int] = {}
        """Rollouts of each held group that have not ended."""
        self._drafts: dict[tuple[str, int], PartialGroup] = {}
        """Of the training groups that are held."""
        self._leaving = False
        self._changed = asyncio.Event()
        self.left = asyncio.Event()
        """Set when `run` has ended."""

    async def on_version(self, version: int) -> None:
        """The engine serves this version from now on.

        Returns when it may be given another, for a worker that only evaluates.
        """
        await self._work.serving(self._engine_id, version)
        self._tally.version = version
        self._occupancy.serve()
        if self._purpose is not Purpose.EVALUATE or self.left.is_set():
            self._changed.set()
            return
        self._evaluated = asyncio.get_running_loop().create_future()
        self._changed.set()
        await asyncio.wait([self._evaluated], timeout=self._pinned_seconds)
        if not self._evaluated.done():
            logger.warning(
                "%s has evaluated version %d for heldout.pinned_seconds = %g: it takes newer "
                "weights, and the rest is evaluated with those",
                self._engine_id, version, self._pinned_seconds,
            )  # fmt: skip

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set or the run is over.

        Raises:
            EngineDied: The engine is gone.
            QueuesError: The broker is.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._heartbeat()),
                    tasks.create_task(self._watch(stop)),
                ]
                if self._purpose is Purpose.EVALUATE:
                    await self._evaluate(stop, tasks)
                while not stop.is_set():
                    room = self._room()
                    if room < self._largest_group:
                        self._changed.clear()
                        await self._changed.wait()
                        continue
                    for lease in await self._lease(room, POLL_SECONDS):
                        self._begin(lease, tasks)
                await self._hand_over()
                for task in (*background, *self._held.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            error = root_error(errors)
            if not isinstance(error, QueueClosed):
                raise error from errors
        finally:
            self._occupancy.freeze()
            self.left.set()
            self._release()

    async def _lease(self, room: int, timeout: float) -> list[Lease]:
        return await self._work.lease(self._engine_id, room, timeout, self._purpose)

    async def _evaluate(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Evaluates until `stop`, and says when there is nothing to do at a version."""
        while not stop.is_set():
            self._changed.clear()
            pinned, room = self._evaluated, self._room()
            idle = not self._held  # before asking: what fails meanwhile is leased again
            leases = await self._lease(room, 0.0) if room > 0 else []
            for lease in leases:
                self._begin(lease, tasks)
            if not leases:
                if idle and pinned is self._evaluated:
                    self._release()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._changed.wait()

    def _release(self) -> None:
        """Another version may come."""
        if self._evaluated is not None and not self._evaluated.done():
            self._evaluated.set_result(None)

    async def _hand_over(self) -> None:
        """Interrupts what is running, and waits until it is saved or put."""
        self._leaving = True
        with suppress(ActorsError):  # an engine that is gone has nothing to save
            await self._interrupt()
            if self._held:
                await asyncio.wait([*self._held.values()], timeout=HAND_OVER_SECONDS)

    def _room(self) -> int:
        """Rollouts that may begin now."""
        return 0 if self._tally.version is None else self._slots - self._occupancy.running

    def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        self._occupancy.change(lease.capacity)
        key = (lease.group_id, lease.attempt)
        self._places[key] = lease.capacity
        self._held[key] = task = tasks.create_task(self._complete(lease))
        task.add_done_callback(lambda _: self._end(lease))

    def _vacate(self, lease: Lease) -> None:
        """One of a group's rollouts has ended: the engine has room, whatever the others do."""
        self._places[lease.group_id, lease.attempt] -= 1
        self._occupancy.change(-1)
        self._changed.set()

    def _end(self, lease: Lease) -> None:
        self._occupancy.change(-self._places.pop((lease.group_id, lease.attempt)))
        del self._held[lease.group_id, lease.attempt]
        self._drafts.pop((lease.group_id, lease.attempt), None)
        self._changed.set()

    async def _complete(self, lease: Lease) -> None:
        """One group from its lease to the broker's answer."""
        draft = PartialGroup(lease)
        try:
            if lease.purpose is Purpose.TRAIN:
                self._drafts[lease.group_id, lease.attempt] = draft
            rollouts = await self._sample(lease, draft)
            if any(rollout.finish_reason is FinishReason.ABORTED for rollout in rollouts):
                await self._save_interrupted(lease, draft)
                return
            group = RolloutGroup(
                group_id=lease.group_id,
                prompt_id=lease.prompt.prompt_id,
                attempt=lease.attempt,
                rollouts=rollouts,
            )
            status = await self._work.put(self._engine_id, encode(group))
        except (RolloutFailed, SchemaError) as error:
            if self._leaving:  # as a conversation that was interrupted in a later turn
                await self._save_interrupted(lease, draft)
                return
            reason = error.reason if isinstance(error, RolloutFailed) else "schema"
            self._tally.groups["failed"] += 1
            await self._work.fail(
                self._engine_id, lease.group_id, lease.attempt, reason=reason, error=str(error)
            )
        except asyncio.CancelledError:
            self._tally.groups["aborted"] += 1
            raise
        else:
            self._tally.groups[PutStatus(status).value] += 1

    async def _save_interrupted(self, lease: Lease, draft: PartialGroup) -> None:
        """A group that the end of this worker has interrupted.

        Raises:
            RolloutFailed: Nobody was to interrupt it.
        """
        if not self._leaving:
            raise RolloutFailed(f"rollouts of group {lease.group_id} were aborted by the engine")
        self._tally.groups["aborted"] += 1
        if draft.changed and lease.purpose is Purpose.TRAIN:
            await self._work.save(self._engine_id, draft.encode())

    async def _sample(self, lease: Lease, draft: PartialGroup) -> list[Rollout]:
        """All rollouts of a group; the first that fails, the baseline too, aborts the others.

        Where some are interrupted the baseline, which may be one of them, is the last.
        """
        greedy = replace(lease, temperature=0.0)
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(
                        self._episode(lease if index < lease.group_size else greedy, index, draft)
                    )
                    for index in range(lease.capacity)
                ]
        except BaseExceptionGroup as errors:
            raise root_error(errors) from errors
        rollouts = [task.result() for task in tasks]
        interrupted = any(rollout.finish_reason is FinishReason.ABORTED for rollout in rollouts)
        if interrupted or not lease.greedy_baseline:
            return rollouts
        *group, baseline = rollouts
        found = {BASELINE_REWARD: baseline.reward}
        return [replace(rollout, metadata={**rollout.metadata, **found}) for rollout in group]

    async def _episode(self, lease: Lease, index: int, draft: PartialGroup) -> Rollout:
        try:
            return await self._rollout(lease, index, draft)
        finally:
            self._vacate(lease)

    async def _rollout(self, lease: Lease, index: int, draft: PartialGroup) -> Rollout:
        saved = draft.get(index)
        if saved is not None and saved.finish_reason is not FinishReason.ABORTED:
            return saved
        rollout = await self._run_episode(lease, index, saved)
        self._tally.tokens += sum(rollout.loss_mask) - (sum(saved.loss_mask) if saved else 0)
        self._tally.rollouts += rollout.finish_reason is not FinishReason.ABORTED
        if index < lease.group_size:
            draft.keep(rollout)
        return rollout

    async def _heartbeat(self) -> None:
        """Renews the leases, saves what has finished, and aborts the groups that are lost."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            if not self._held:
                continue
            for lost in await self._work.heartbeat(self._engine_id, list(self._held)):
                if (task := self._held.get(lost)) is not None:
                    task.cancel()
            for draft in [*self._drafts.values()]:
                if draft.due:
                    await self._work.save(self._engine_id, draft.encode())

    async def _watch(self, stop: asyncio.Event) -> None:
        """Wakes the loop for `stop`."""
        await stop.wait()
        self._changed.set()
