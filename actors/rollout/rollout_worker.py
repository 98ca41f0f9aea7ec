"""The loop of an actor: leases groups, runs their rollouts, and puts the results.

    first weights ─▶ lease for as many rollouts as there is capacity ─▶ one task a group:
                                              its rollouts at once ─▶ rewards of groups ─▶ put
                                                  one failed: save the others ─▶ fail
    every few seconds: heartbeat of all groups held ─▶ abort those that are no longer ours
                       rollouts that have finished before the others of their group ─▶ save

A worker that only evaluates makes `on_version` wait, and so the next version, until nothing is left
to evaluate at this one. The loop ends when the run is over (QueueClosed), which aborts what is
running, or at `stop`, which interrupts it and saves the sampled tokens for the group's next lease.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace

from actors.errors import Excused, RolloutFailed, root_error
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.notes import noted_turns
from actors.rollout.partial_group import PartialGroup
from headway.errors import HeadwayError, InputError
from headway.user_code import cut
from queues.errors import QueueClosed, SchemaError
from queues.protocols import WorkQueue
from queues.records import FinishReason, Lease, Purpose, PutStatus, Rollout, RolloutGroup
from queues.schema import encode

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Longest wait for a lease before `stop` and the capacity are checked again."""
LONGEST_ERROR = 12_000
"""Characters that are kept of the error of a group."""


@dataclass(eq=False)
class RolloutWorker:
    """Keeps one engine full of rollouts; raises InputError if not even one group fits into it."""

    statistics: ActorStatistics
    """Counts what is done; its engine holds the leases."""
    work: WorkQueue
    run_episode: Callable[[Lease, int, Rollout | None], Awaitable[Rollout]]
    """Makes one rollout of a lease, given its index and what an earlier attempt sampled of it."""
    _: KW_ONLY
    interrupt: Callable[[], Awaitable[None]]
    """Ends every rollout as it is (`RolloutEngine.interrupt`)."""
    max_concurrent_rollouts: int
    """Capacity. A group begins as a whole; each of its rollouts frees its share when it ends."""
    largest_group: int
    """Most rollouts of a lease, a baseline included."""
    heartbeat_seconds: float
    score_group: Callable[[Lease, list[Rollout]], Awaitable[list[Rollout]]] | None = None
    """Adds the rewards that compare all rollouts of a group; None: there are none."""
    purpose: Purpose | None = None
    """Purpose of its leases; None leases for either. A worker that only evaluates takes no new
    version while anything is left to evaluate at its own."""
    pinned_seconds: float = 600.0
    """Longest time that such a worker makes a new version wait."""
    hand_over_seconds: float = 5.0
    """Time for interrupted rollouts to be saved, and for rollouts that just end to be put."""

    def __post_init__(self) -> None:
        if self.max_concurrent_rollouts < self.largest_group:
            raise InputError(
                f"actors.max_concurrent_rollouts = {self.max_concurrent_rollouts} must be at least "
                f"{self.largest_group}, the rollouts of a group: none could ever be leased"
            )
        self._engine_id = self.statistics.engine_id
        self._occupancy = self.statistics.occupancy
        self._evaluated: asyncio.Future[None] | None = None
        """Done when nothing is left to evaluate at the version; `on_version` waits for it."""
        self.held: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Tasks of the groups with a lease, by group id and attempt."""
        self._running: dict[tuple[str, int], int] = {}
        """Rollouts of each held group that have not ended."""
        self._partial_groups: dict[tuple[str, int], PartialGroup] = {}
        """Rollouts so far of the training groups that are held."""
        self._leaving = False
        self._changed = asyncio.Event()
        self.left = asyncio.Event()
        """Set when `run` has ended."""

    async def on_version(self, version: int) -> None:
        """Take note of the version served; if it only evaluates, return when another may come."""
        await self.work.serving(self._engine_id, version)
        self.statistics.version = version
        self._occupancy.serve()
        if self.purpose is not Purpose.EVALUATE or self.left.is_set():
            self._changed.set()
            return
        self._evaluated = asyncio.get_running_loop().create_future()
        self._changed.set()
        await asyncio.wait([self._evaluated], timeout=self.pinned_seconds)
        if not self._evaluated.done():
            logger.warning(
                "%s has evaluated version %d for heldout.pinned_seconds = %g: it takes newer "
                "weights, and the rest is evaluated with those",
                self._engine_id, version, self.pinned_seconds,
            )  # fmt: skip

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or the run is over.

        Raises EngineDied if the engine is gone, and HeadwayError if the broker is.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._heartbeat()),
                    tasks.create_task(self._watch(stop)),
                ]
                if self.purpose is Purpose.EVALUATE:
                    await self._evaluate(stop, tasks)
                while not stop.is_set():
                    capacity = self._capacity()
                    if capacity < self.largest_group:
                        self._changed.clear()
                        await self._changed.wait()
                        continue
                    for lease in await self._lease(capacity, POLL_SECONDS, stop):
                        self._begin(lease, tasks)
                await self._hand_over()
                for task in (*background, *self.held.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            error = root_error(errors)
            if not isinstance(error, QueueClosed):
                raise error from errors
        finally:
            self._occupancy.freeze()
            self.left.set()
            self._release()

    async def _lease(self, rollouts: int, timeout: float, stop: asyncio.Event) -> list[Lease]:
        """Return new leases, or none as soon as `stop` is set, even if the broker is restarting."""
        leasing = asyncio.ensure_future(
            self.work.lease(self._engine_id, rollouts, timeout, self.purpose)
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({leasing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return leasing.result() if leasing.done() else []
        finally:
            leasing.cancel()
            stopping.cancel()

    async def _evaluate(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Evaluate until `stop`; release the version when nothing is left to do at it."""
        while not stop.is_set():
            self._changed.clear()
            pinned, capacity = self._evaluated, self._capacity()
            idle = not self.held  # before asking: a group that fails meanwhile is leased again
            leases = await self._lease(capacity, 0.0, stop) if capacity > 0 else []
            for lease in leases:
                self._begin(lease, tasks)
            if not leases:
                if idle and pinned is self._evaluated:
                    self._release()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._changed.wait()

    def _release(self) -> None:
        """Let `on_version` return, so that another version may come."""
        if self._evaluated is not None and not self._evaluated.done():
            self._evaluated.set_result(None)

    async def _hand_over(self) -> None:
        """Interrupt the running groups, and wait until they are saved or put."""
        self._leaving = True
        with suppress(HeadwayError):  # an engine that is gone has nothing to save
            await self.interrupt()
            if self.held:
                await asyncio.wait([*self.held.values()], timeout=self.hand_over_seconds)

    def _capacity(self) -> int:
        """Return how many rollouts may begin now."""
        if self.statistics.version is None:
            return 0
        return self.max_concurrent_rollouts - self._occupancy.running

    def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        self._occupancy.change(lease.capacity)
        key = (lease.group_id, lease.attempt)
        self._running[key] = lease.capacity
        self.held[key] = task = tasks.create_task(self._complete(lease))
        task.add_done_callback(lambda _: self._end(lease))

    def _end(self, lease: Lease) -> None:
        self._occupancy.change(-self._running.pop((lease.group_id, lease.attempt)))
        del self.held[lease.group_id, lease.attempt]
        self._partial_groups.pop((lease.group_id, lease.attempt), None)
        self._changed.set()

    async def _complete(self, lease: Lease) -> None:
        """Run one group from its lease to the broker's answer."""
        partial = PartialGroup(lease)
        try:
            if lease.purpose is Purpose.TRAIN:
                self._partial_groups[lease.group_id, lease.attempt] = partial
            rollouts = await self._sample(lease, partial)
            if any(rollout.finish_reason is FinishReason.ABORTED for rollout in rollouts):
                await self._save_interrupted(lease, partial)
                return
            group = RolloutGroup(
                group_id=lease.group_id,
                prompt_id=lease.prompt.prompt_id,
                attempt=lease.attempt,
                rollouts=rollouts,
            )
            status = await self.work.put(self._engine_id, encode(group))
        except (RolloutFailed, SchemaError) as error:
            if self._leaving:  # the interrupted engine may be why
                await self._save_interrupted(lease, partial)
                return
            reason = error.reason if isinstance(error, RolloutFailed) else "schema"
            self.statistics.groups["failed"] += 1
            message = cut(str(error), LONGEST_ERROR)
            await self.work.fail(
                self._engine_id, lease.group_id, lease.attempt, reason=reason, error=message
            )
        except asyncio.CancelledError:
            self.statistics.groups["aborted"] += 1
            raise
        else:
            self.statistics.groups[PutStatus(status).value] += 1

    async def _save_interrupted(self, lease: Lease, partial: PartialGroup) -> None:
        """Save an interrupted group; raise RolloutFailed if this worker is not ending."""
        if not self._leaving:
            raise RolloutFailed(f"rollouts of group {lease.group_id} were aborted by the engine")
        self.statistics.groups["aborted"] += 1
        if partial.changed and lease.purpose is Purpose.TRAIN:
            await self.work.save(self._engine_id, partial.encode())

    async def _sample(self, lease: Lease, partial: PartialGroup) -> list[Rollout]:
        """Return all rollouts of a group, with the baseline last if any was interrupted.

        If some fail, the others are saved when they have ended, so that only those are sampled
        again, and the first failure that counts as an attempt is raised.
        """
        greedy = replace(lease, temperature=0.0)
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(
                        self._outcome(lease if index < lease.group_size else greedy, index, partial)
                    )
                    for index in range(lease.capacity)
                ]
        except BaseExceptionGroup as errors:
            raise root_error(errors) from errors
        outcomes = [task.result() for task in tasks]
        failures = [outcome for outcome in outcomes if isinstance(outcome, RolloutFailed)]
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        interrupted = any(rollout.finish_reason is FinishReason.ABORTED for rollout in rollouts)
        if self.score_group is not None and not (failures or interrupted):
            try:
                rollouts = await self.score_group(lease, rollouts)
            except RolloutFailed as failure:
                failures = [failure]
        if failures:
            if partial.changed and lease.purpose is Purpose.TRAIN:
                await self.work.save(self._engine_id, partial.encode())
            raise min(failures, key=lambda failure: isinstance(failure, Excused))
        if interrupted or not lease.greedy_baseline:
            return rollouts
        *group, baseline = rollouts
        return [replace(rollout, baseline_reward=baseline.reward) for rollout in group]

    async def _outcome(
        self, lease: Lease, index: int, partial: PartialGroup
    ) -> Rollout | RolloutFailed:
        try:
            return await self._episode(lease, index, partial)
        except RolloutFailed as failure:
            return failure

    async def _episode(self, lease: Lease, index: int, partial: PartialGroup) -> Rollout:
        saved = partial.get(index)
        try:
            if saved is not None and saved.finish_reason is not FinishReason.ABORTED:
                return saved
            rollout = await self.run_episode(lease, index, saved)
        finally:  # its share of the engine is free
            self._running[lease.group_id, lease.attempt] -= 1
            self._occupancy.change(-1)
            self._changed.set()
        noted = sum(len(turn.token_ids) for turn in noted_turns(lease, index).values())
        known = max(sum(saved.loss_mask) if saved else 0, noted)
        self.statistics.tokens += max(0, sum(rollout.loss_mask) - known)
        if rollout.finish_reason is not FinishReason.ABORTED:
            self.statistics.rollouts += 1
        if index < lease.group_size:
            partial.keep(rollout)
        return rollout

    async def _heartbeat(self) -> None:
        """Renew the leases, save finished rollouts, and abort the groups whose lease is lost."""
        while True:
            await asyncio.sleep(self.heartbeat_seconds)
            for lost in await self.work.heartbeat(self._engine_id, self.held.keys()):
                if (task := self.held.get(lost)) is not None:
                    task.cancel()
            for partial in [*self._partial_groups.values()]:
                if partial.due:
                    await self.work.save(self._engine_id, partial.encode())

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()
