"""A rank of the learner as a Ray actor. Rank 0 leads; the others do what it calls for.

A rank that raises fails the call of rank 0, whose `run` reports it; `live` reports a death.
"""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

import ray

from headway.cpu_cores import bind_process
from headway.errors import HeadwayError
from headway.metrics import MetricsAccess
from headway.output_limits import keep_logs_small
from headway.ray_process import keep_title, serve_metrics
from headway.ray_service import ServiceProcess
from learner import disk_wait
from learner.metrics import LearnerMetrics
from learner.ranks.spec import LearnerSpec
from weight_sync.open_files import allow_open_files
from weight_sync.probe import ProbeBudget

if TYPE_CHECKING:
    from learner.learner import Learner
    from learner.ranks.rank import Rank
    from weight_sync.publish.background_publisher import BackgroundPublisher

P = ParamSpec("P")
T = TypeVar("T")


class RankActor(ServiceProcess):
    """Loads the policy in `start`, trains in `run`. Created by `ray_group.create_learner`."""

    def __init__(self, spec: LearnerSpec, rank: int) -> None:
        self._spec, self._number = spec, rank
        self._stop = asyncio.Event()
        # One thread for everything that computes, so that torch keeps one pool of threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
        self._publisher: BackgroundPublisher | None = None
        self._learner: Learner | None = None
        self._title: asyncio.Task[Never] | None = None

    def __repr__(self) -> str:
        return f"learner-{self._number}"

    def _state(self) -> str:
        """Return the title of this process; only rank 0 shows its state."""
        if self._number:
            return f"{self}"
        return f"{self}: {self._learner.state if self._learner else 'loads the model'}"

    async def open_store(self) -> tuple[str, int]:
        """Make the store where ranks meet, on rank 0; return its address."""
        from learner.engine.process_group import open_store

        host = ray.util.get_node_ip_address()
        self._store = await self._call(open_store, host)
        return host, self._store.port

    async def start(self, address: tuple[str, int] | None) -> None:
        """Load model and optimizer, on this rank's cores.

        `address` is that of the store where several ranks meet.

        Raises:
            InputError: The model cannot be trained, or the cores do not exist.
        """
        gc.disable()  # while it imports, of which collecting would be a fifth
        keep_logs_small()
        allow_open_files()
        self._title = asyncio.create_task(keep_title("RankActor", self._state))
        cores = self._spec.config.cores_of_rank(self._number)
        if cores is not None:
            bind_process(cores, "learner.cores")
        await self._call(self._load, address)
        self._metrics = LearnerMetrics()
        gc.collect()
        gc.freeze()  # what was loaded stays; scanning it again would take most of a second
        gc.enable()

    def _rank_type(self) -> type["Rank"]:
        from learner.ranks.rank import Rank

        return Rank

    def _load(self, address: tuple[str, int] | None) -> None:
        from learner.engine.checkpoint import check_shared
        from learner.engine.process_group import find_store, join

        if address is not None:
            store = self._store if self._number == 0 else find_store(address)
            ranks = self._spec.config.ranks
            join(store, self._number, ranks)
            check_shared(Path(self._spec.checkpoints), store, self._number, ranks)
        self._rank = self._rank_type()(self._spec)

    async def run(self, followers: list[Any], broker: Any, broadcaster: Any) -> int:
        """Train to the last version or to `stop`, as rank 0; return the version reached.

        Published weights are kept until this process ends, so that actors can still take them.

        Raises:
            HeadwayError: The loaded weights are not those of `spec.version`.
        """
        from learner.learner import Learner
        from learner.ranks.ray_leader import RankZero
        from weight_sync.factory import make_publisher

        spec, state = self._spec, self._rank.state
        if spec.version != (state.version if state else 0):
            raise HeadwayError(
                f"training was to go on at version {spec.version}, but the weights are those of "
                f"{f'version {state.version}' if state else 'the initial model'}"
            )
        self._publisher = await self._call(make_publisher, spec.weight_sync, broadcaster)
        adapter_alone = self._rank.published_adapter is not None
        same = (spec.config.dtype, spec.weight_sync.wire_dtype, adapter_alone)
        leader = RankZero(
            self._rank, followers, self._call, self._publisher, broadcaster,
            ProbeBudget(spec.weight_sync.probe),
        )  # fmt: skip
        learner = self._learner = Learner(
            leader,
            broker,
            steps=spec.steps if spec.last_version is None else spec.last_version,
            checkpoint_every=spec.config.checkpoint_every,
            start_version=spec.version,
            start_checksum=state.checksum_as(*same) if state else None,
            totals=state.totals if state else {},
            session_started_at=spec.session_started_at,
            observe=self._metrics.observe,
        )
        reached = await learner.run(self._stop)
        # A direct publisher first waits `timeout_seconds` for an engine that hangs.
        await self._call(self._publisher.flush, 2 * spec.weight_sync.timeout_seconds)
        return reached

    async def serve_metrics(self, access: MetricsAccess) -> str:
        """Serve metrics, on rank 0 of its learner, once `start` is done; return host:port."""
        return serve_metrics([] if self._number else [self._metrics], access)

    async def announce_again(self) -> None:
        """Announce the newest version of rank 0 to a broadcaster that has lost it."""
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.announce_again)

    async def stop(self) -> None:
        """End `run` of rank 0 at the next batch boundary, with a checkpoint."""
        self._stop.set()

    async def paused(self) -> str | None:
        """Return why this rank waits for disk space, or None; answers while the rank computes."""
        return disk_wait.paused()

    async def update(self, payloads: list[Any], version: int) -> None:
        """Take part in training a batch of payloads from `queues.schema.to_arrays`."""
        views = [memoryview(payload) for payload in payloads]
        await self._call(self._rank.update, views, version)

    async def gather(self, *, probe: bool = False) -> None:
        """Take part in gathering the weights, after a probe if there is one."""
        await self._call(self._rank.gather, probe=probe)

    async def capture(self) -> None:
        """Take part in copying the state for a checkpoint."""
        await self._call(self._rank.capture)

    async def write(self, temporary: str) -> None:
        """Write this rank's part of a checkpoint, while it trains."""
        await asyncio.to_thread(self._rank.write, temporary)

    async def _call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **options))
