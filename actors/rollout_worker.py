"""The loop of an actor: leases groups, has their rollouts run, and puts the results.

    first weights ─▶ lease for as many rollouts as have room ─▶ one task a group:
                                                                  its rollouts at once ─▶ put
                                                                        └─ one failed ──▶ fail
    (a greedy rollout that a lease asks for beside its group runs with them, and is not put)
    every few seconds: heartbeat of all groups held ─▶ abort those that are no longer ours

Who waits on whom: the loop on the first version (`on_version`), then on room (a group's end), then
on the broker, which grants what admission allows. It ends when the run is over (QueueClosed) or at
`stop`; both abort what is running, and the broker redelivers what it still wants when the leases
expire. An engine that died, or a broker that is lost, ends it with that error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from actors.errors import InputError, RolloutFailed
from actors.failures import gravest
from actors.tally import Tally
from queues.errors import QueueClosed, SchemaError
from queues.protocols import WorkQueue
from queues.records import BASELINE_REWARD, Lease, PutStatus, Rollout, RolloutGroup
from queues.schema import encode

POLL_SECONDS = 1.0
"""Longest wait for a lease before `stop` and the room are looked at again."""


class RolloutWorker:
    """Keeps one engine full of rollouts.

    Args:
        tally: Counts what is done; its engine holds the leases.
        work: The broker.
        run_episode: Makes one rollout of a lease, given the sample's index.
        max_concurrent_rollouts: Room, in rollouts; groups begin and end as a whole.
        largest_group: Most rollouts that a lease may be for, a baseline included.
        heartbeat_seconds: How often leases are renewed.

    Raises:
        InputError: Not even one group has room.
    """

    def __init__(
        self,
        tally: Tally,
        work: WorkQueue,
        run_episode: Callable[[Lease, int], Awaitable[Rollout]],
        *,
        max_concurrent_rollouts: int,
        largest_group: int,
        heartbeat_seconds: float,
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
        self._run_episode = run_episode
        self._slots = max_concurrent_rollouts
        self._largest_group = largest_group
        self._heartbeat_seconds = heartbeat_seconds
        self._held: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def on_version(self, version: int) -> None:
        """The engine serves this version from now on."""
        await self._work.serving(self._engine_id, version)
        self._tally.version = version
        self._occupancy.serve()
        self._changed.set()

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
                while not stop.is_set():
                    room = self._room()
                    if room < self._largest_group:
                        self._changed.clear()
                        await self._changed.wait()
                        continue
                    for lease in await self._work.lease(self._engine_id, room, POLL_SECONDS):
                        self._begin(lease, tasks)
                for task in (*background, *self._held.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            error = gravest(errors)
            if not isinstance(error, QueueClosed):
                raise error from errors
        finally:
            self._occupancy.freeze()

    def _room(self) -> int:
        """Rollouts that may begin now."""
        return 0 if self._tally.version is None else self._slots - self._occupancy.running

    def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        self._occupancy.change(lease.room)
        key = (lease.group_id, lease.attempt)
        self._held[key] = task = tasks.create_task(self._complete(lease))
        task.add_done_callback(lambda _: self._end(lease))

    def _end(self, lease: Lease) -> None:
        self._occupancy.change(-lease.room)
        del self._held[lease.group_id, lease.attempt]
        self._changed.set()

    async def _complete(self, lease: Lease) -> None:
        """One group from its lease to the broker's answer."""
        try:
            group = RolloutGroup(
                group_id=lease.group_id,
                prompt_id=lease.prompt.prompt_id,
                attempt=lease.attempt,
                rollouts=await self._sample(lease),
            )
            status = await self._work.put(self._engine_id, encode(group))
        except (RolloutFailed, SchemaError) as error:
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

    async def _sample(self, lease: Lease) -> list[Rollout]:
        """All rollouts of a group; the first that fails, the baseline too, aborts the others."""
        greedy = replace(lease, temperature=0.0)
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(
                        self._episode(lease if index < lease.group_size else greedy, index)
                    )
                    for index in range(lease.room)
                ]
        except BaseExceptionGroup as errors:
            raise gravest(errors) from errors
        rollouts = [task.result() for task in tasks]
        if not lease.greedy_baseline:
            return rollouts
        *group, baseline = rollouts
        found = {BASELINE_REWARD: baseline.reward}
        return [replace(rollout, metadata={**rollout.metadata, **found}) for rollout in group]

    async def _episode(self, lease: Lease, index: int) -> Rollout:
        rollout = await self._run_episode(lease, index)
        self._tally.tokens += sum(rollout.loss_mask)
        self._tally.rollouts += 1
        return rollout

    async def _heartbeat(self) -> None:
        """Renews the leases and aborts the groups that are lost."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            if not self._held:
                continue
            for group_id in await self._work.heartbeat(self._engine_id, list(self._held)):
                for key, task in list(self._held.items()):
                    if key[0] == group_id:
                        task.cancel()

    async def _watch(self, stop: asyncio.Event) -> None:
        """Wakes the loop for `stop`."""
        await stop.wait()
        self._changed.set()
