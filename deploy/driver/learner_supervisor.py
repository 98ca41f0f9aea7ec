"""Keeps the learner alive: makes all of its ranks again when one of them dies or hangs.

    start ─▶ run ─▶ the last version
      ▲       └─▶ a rank died ─▶ end all ─▶ wait ─▶ fence them at the broker ─┐
      └──────────── load the newest committed checkpoint ◀────────────────────┘

The new ranks train the batches after that checkpoint again, as recorded, and then new ones. Actors
go on meanwhile as far as admission allows. Errors that new ranks would only repeat end the run: bad
input, a loss that is not finite, a bug. So does a learner that keeps dying.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deploy.driver.restart_policy import Clock, Restarts
from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.observability.exporter import show_process
from deploy.storage.repair.checkpoints import find_checkpoint_of_live
from deploy.storage.run_record import LEARNER
from headway.daemon_thread import run_in_daemon_thread
from headway.metrics import MetricsAccess
from learner.errors import RankFailed
from learner.ranks.ray_calls import call_rank
from learner.ranks.ray_group import LearnerGroup
from learner.ranks.spec import LearnerSpec
from queues.ray_broker import BrokerClient
from weight_sync.ray_broadcaster import BroadcasterClient

LOOK_SECONDS = 1.0
"""Seconds between two looks for free resources."""


class LearnerSupervisor:
    """The ranks of a learner through all of their restarts.

    `create` makes their processes in Ray, or returns None while there is no node for all of them.
    They serve metrics by `access`, or none if it is None.
    """

    def __init__(
        self,
        context: RunContext,
        spec: LearnerSpec,
        create: Callable[[LearnerSpec], LearnerGroup | None],
        queues: tuple[BrokerClient, BroadcasterClient],
        *,
        access: MetricsAccess | None = None,
        clock: Clock = Clock(),  # noqa: B008  (frozen)
    ) -> None:
        self._context, self._spec, self._create = context, spec, create
        self._broker, self._broadcaster = queues
        self._access, self._clock = access, clock
        self._restarts = Restarts(context, LEARNER, clock)
        if (group := create(spec)) is None:
            raise RunFailed("a node of the learner was lost before its ranks were made")
        self._group = group
        self._epoch = 0
        """Number of the present ranks; what those before it say is refused."""
        self.starts = True
        """True while ranks are made and load, for which they have their own deadline."""
        self._trained = context.record.version
        """Version at the last death of a rank, or at the begin."""
        self._stopping = False
        self._done = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None
        """The newest version, on its way to a broadcaster that was made again."""
        self._ended: str | None = None
        """Why the present ranks were ended, if none died by itself."""
        self._silent = 0.0
        """Seconds for which they had not answered then."""
        self.metrics: dict[str, str] = {}
        """Addresses of the metrics of the ranks, as host:port, by name."""

    @property
    def saved(self) -> bool:
        """True once the last version, or that of `stop`, is trained and saved."""
        return self._done.is_set()

    @property
    def handles(self) -> list[Any]:
        """Ray's handles of the present ranks, in order."""
        return self._group.handles

    async def start(self) -> None:
        """Load the policy in all ranks, again if one dies.

        Raises:
            HeadwayError: A rank raised something that a new one would raise too.
            RunFailed: They died more often in a row than deploy.max_restarts.
        """
        try:
            await self._load()
        except RankFailed as error:
            await self._recover(error)

    async def run(self) -> None:
        """Train to the last version or to `stop`; to be called after `start`.

        Raises:
            HeadwayError: A rank raised something that a new one would raise too.
            RunFailed: They died more often in a row than deploy.max_restarts.
            JournalError: The newest checkpoint is damaged, and groups after the one before are too.
        """
        while not self._stopping:
            broker = self._broker.of_epoch(self._epoch)
            try:
                self.starts = False
                await self._group.run(broker, self._broadcaster.of_epoch(self._epoch))
            except RankFailed as error:
                await self._recover(error)
            else:
                self._done.set()
                return

    async def remain(self) -> None:
        """Let actors take the last version after `run`, whose memory is the ranks'; never returns.

        Ranks that die are made again, and publish it anew; errors are those of `run`.
        """
        await self._done.wait()
        while not self._stopping:
            try:
                await self._group.watch()
            except RankFailed as error:
                await self._recover(error)
                await self.run()

    def restart(self, reason: str, epoch: int, silent: float = 0.0) -> None:
        """End the ranks of an epoch, so that `run` makes others; nothing if they are gone.

        They have not answered for `silent` seconds, which count as lost.
        """
        if not (self.starts or self.saved) and epoch == self._epoch:
            self._ended, self._silent = reason, silent
            self._group.kill()

    def stop(self) -> None:
        """End `run` at the next batch boundary, with a checkpoint if the ranks live."""
        self._stopping = True
        self._group.stop()

    async def paused(self) -> str | None:
        """See `LearnerGroup.paused`."""
        return await self._group.paused()

    async def announce_again(self) -> None:
        """Have the newest version announced to a broadcaster that was made again."""
        # In the background, since the broadcaster may die again before it has heard.
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = asyncio.create_task(self._group.announce_again())

    async def _load(self) -> None:
        await self._group.start()
        if self._access is not None:
            self.metrics = {LEARNER: await self._group.serve_metrics(self._access)}
            for rank, handle in enumerate(self.handles[1:], start=1):
                serving = show_process(handle, self._access)
                self.metrics[f"{LEARNER}-{rank}"] = await call_rank(rank, serving)

    async def _recover(self, error: RankFailed | RunFailed) -> None:
        """Make all ranks again, from the newest committed checkpoint, unless the run stops.

        Deaths are counted anew if they trained a new batch: what others trained does not count.
        """
        before, self._trained = self._trained, self._context.record.version
        trained = self._trained > before
        while True:
            reason, self._ended = self._ended or self._cause(error), None
            self.starts = True
            self._group.kill()
            if self._stopping:
                return
            silent, self._silent = self._silent, 0.0
            if isinstance(error, RankFailed):
                silent = max(silent, error.silent_seconds)
            await self._restarts.allow(reason, progressed=trained, silent=silent)
            self._epoch, trained = self._epoch + 1, False
            try:
                await self._go_back()
                await self._restarts.await_start(self._load_again())
            except (RankFailed, RunFailed) as again:
                error = again
            else:
                return

    async def _go_back(self) -> None:
        """Fence the ranks before, and find the newest committed checkpoint, which is verified.

        Raises:
            RunFailed: Both together take longer than deploy.start_timeout_seconds.
        """
        directory, say = self._context.directory, self._context.console.say
        seconds = self._context.config.deploy.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._broker.begin_learner(self._epoch)
                saved = await run_in_daemon_thread(lambda: find_checkpoint_of_live(directory, say))
        except TimeoutError:
            raise RunFailed(
                f"the broker's answer and the newest checkpoint's verification took longer than "
                f"deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        version, folder = saved or (0, None)
        say(f"the learner goes on from version {version}")
        checkpoint = str(folder.resolve()) if folder else None
        self._spec = replace(self._spec, checkpoint=checkpoint, version=version)

    async def _load_again(self) -> None:
        """Load the policy in new ranks, once there is a node for all of them."""
        waits = False
        while (group := await run_in_daemon_thread(lambda: self._create(self._spec))) is None:
            if not waits:
                self._context.console.say(
                    "the learner waits for a node with free resources, since its own is lost"
                )
            waits = True
            await self._clock.sleep(LOOK_SECONDS)
        self._group = group
        await self._load()

    def _cause(self, error: RankFailed | RunFailed) -> str:
        """Describe an error that new ranks may not meet again; raise any other.

        A rank of several that only lost a connection counts as dead.
        """
        if isinstance(error, RunFailed) or error.died:
            return str(error)
        if len(self.handles) > 1 and not error.is_root_cause:
            return str(error)
        raise error
