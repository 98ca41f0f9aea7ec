"""Supervises the learner: makes all of its ranks again when one of them dies or hangs.

    a rank died ─▶ end all ─▶ fence them at the broker ─▶ load the newest committed checkpoint

The new ranks train the batches after that checkpoint again, as recorded, and then new ones. Actors
go on meanwhile as far as admission allows.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from deploy.cluster.placement_group import LOOK_SECONDS
from deploy.driver.run_context import RunContext
from deploy.driver.supervisor import TIMING, Supervisor, Timing
from deploy.errors import RunFailed
from deploy.storage.repair.whole_checkpoints import find_checkpoint
from headway.daemon_thread import run_in_daemon_thread
from headway.metrics import MetricsAccess
from headway.roles import ProcessName, Role
from learner.errors import RankFailed
from learner.ranks.ray_group import LearnerGroup
from learner.ranks.spec import LearnerSpec
from queues.ray_broker import BrokerClient
from weight_sync.ray_broadcaster import BroadcasterClient


class LearnerSupervisor(Supervisor):
    """The ranks of a learner through all of their restarts.

    `create` makes their processes in Ray, or returns None while there is no node for all of them.
    """

    def __init__(
        self,
        context: RunContext,
        spec: LearnerSpec,
        create: Callable[[LearnerSpec], LearnerGroup | None],
        queues: tuple[BrokerClient, BroadcasterClient],
        *,
        access: MetricsAccess | None = None,
        timing: Timing = TIMING,
    ) -> None:
        super().__init__(context, ProcessName(Role.LEARNER), timing)
        self._spec, self._create, self._access = spec, create, access
        self._broker, self._broadcaster = queues
        if (group := create(spec)) is None:
            raise RunFailed("a node of the learner was lost before its ranks were made")
        self._group = group
        self._epoch = 0
        """Number of the present ranks; what those before it say is refused."""
        self._stopping = False
        self._done = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None
        """The newest version, on its way to a broadcaster that was made again."""

    @property
    def saved(self) -> bool:
        """True once the last version, or that of `stop`, is trained and saved."""
        return self._done.is_set()

    @property
    def is_wanted(self) -> bool:
        """True until `stop`."""
        return not self._stopping

    @property
    def handles(self) -> Mapping[ProcessName, Any]:
        """Handles in Ray of the present ranks, in order."""
        return {ProcessName(Role.LEARNER, n): rank for n, rank in enumerate(self._group.handles)}

    async def remain(self) -> None:
        """Let actors take the last version after `run`, also from new ranks; never returns."""
        await self._done.wait()
        while self.is_wanted:
            try:
                await self._group.watch()
            except RankFailed as error:
                if await self._recover(error):
                    await self.run()

    def restart_ranks(self, epoch: int, reason: str, silent: float = 0.0) -> None:
        """Restart the ranks of an epoch (see `restart`), unless they are gone or have saved."""
        if epoch == self._epoch and not self.saved:
            self.restart(reason, silent)

    def stop(self) -> None:
        """End `run` at the next batch boundary, with a checkpoint if the ranks live."""
        self._stopping = True
        self._group.stop()

    async def paused(self) -> str | None:
        """See `LearnerGroup.paused`."""
        return await self._group.paused()

    async def announce_again(self) -> None:
        """Have the newest version announced to a new broadcaster, which may die again meanwhile."""
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = asyncio.create_task(self._group.announce_again())

    async def _prepare(self) -> None:
        """Fence the ranks before, and find and verify the newest committed checkpoint."""
        self._epoch += 1
        directory = self._context.directory
        seconds = self._context.config.deploy.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._broker.begin_learner(self._epoch)
                find = partial(find_checkpoint, directory, self._say, is_live=True)
                version, folder = await run_in_daemon_thread(find) or (0, None)
        except TimeoutError:
            raise RunFailed(
                f"the broker's answer and the newest checkpoint's verification took longer than "
                f"deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        self._say(f"the learner goes on from version {version}")
        checkpoint = str(folder.resolve()) if folder else None
        self._spec = replace(self._spec, checkpoint=checkpoint, version=version)

    async def _start(self, *, again: bool) -> None:
        """Load the policy in all ranks, in new ones once there is a node for all of them."""
        if again:
            create, waits = partial(self._create, self._spec), False
            while (group := await run_in_daemon_thread(create)) is None:
                if not waits:
                    text = "waits for a node with free resources, since its own is lost"
                    self._say(f"the learner {text}")
                waits = True
                await self._timing.sleep(LOOK_SECONDS)
            self._group = group
        await self._group.start()
        if self._access is not None:
            names = [self.name, *[*self.handles][1:]]
            addresses = await self._group.serve_metrics(self._access)
            self.metrics = dict(zip(names, addresses, strict=True))

    async def _work(self) -> None:
        """Train to the last version or to `stop`."""
        broker = self._broker.of_epoch(self._epoch)
        await self._group.run(broker, self._broadcaster.of_epoch(self._epoch))
        self._done.set()

    def _kill(self) -> None:
        self._group.kill()

    def _is_settled(self, worked: float) -> bool:
        """Return True if the ranks trained a new batch: what others trained does not count."""
        return self._context.record.version > self._trained

    def _reason(self, error: Exception) -> str | None:
        """Describe an error; a rank of several that only lost a connection counts as dead."""
        if isinstance(error, RankFailed):
            lost_connection = len(self.handles) > 1 and not error.is_root_cause
            return str(error) if error.died or lost_connection else None
        return str(error) if isinstance(error, RunFailed) else None
