"""A rank of the learner as a Ray actor. Rank 0 leads; the others do what it calls for.

A failure of any rank reaches the driver by `run` of rank 0 or `watch` of the others, while ranks
that wait for it in a collective operation still hang.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

import ray

from learner import full_disk
from learner.config.cpu_affinity import cores_of_rank
from learner.config.learner import LearnerConfig
from learner.errors import LearnerError
from queues.runtime.cpu_affinity import bind_process
from queues.runtime.ray_process_title import keep_title
from weight_sync.config import WeightSyncConfig

if TYPE_CHECKING:
    from learner.learner import Learner
    from learner.metrics import LearnerMetrics

P = ParamSpec("P")
T = TypeVar("T")


class RankActor:
    """Loads the policy in `start`, trains in `run`. Created by `ray_group.create_learner`."""

    def __init__(self, config: LearnerConfig, rank: int) -> None:
        self._config, self._number = config, rank
        self._stop = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # One thread for everything that computes, so that torch keeps one pool of threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
        self._metrics: LearnerMetrics | None = None
        self._learner: Learner | None = None
        self._title: asyncio.Task[Never] | None = None

    def __repr__(self) -> str:
        return f"learner-{self._number}"

    def _state(self) -> str:
        """What it does, for the title of its process; what the others do, rank 0 knows."""
        if self._number:
            return f"{self}"
        return f"{self}: {self._learner.state if self._learner else 'loads the model'}"

    async def open_store(self) -> tuple[str, int]:
        """Rank 0: makes the store where ranks meet; its address."""
        from learner.engine.process_group import open_store

        host = ray.util.get_node_ip_address()
        self._store = await self._call(open_store, host)
        return host, self._store.port

    async def start(self, address: tuple[str, int] | None, **settings: Any) -> None:
        """Loads model and optimizer, on this rank's cores.

        Args:
            address: Of the store; None where there is one rank.
            **settings: Those of `rank.Rank`.

        Raises:
            InputError: The model cannot be trained, or the cores do not exist.
        """
        self._title = asyncio.create_task(keep_title("RankActor", self._state))
        cores = cores_of_rank(self._config, self._number)
        if cores is not None:
            bind_process(cores, "learner.cores")
        await self._call(self._load, address, settings)
        gc.collect()
        gc.freeze()  # what was loaded stays: looking through it again would take most of a second

    def _load(self, address: tuple[str, int] | None, settings: dict[str, Any]) -> None:
        from learner.engine.process_group import find_store, join
        from learner.ranks.rank import Rank

        if address is not None:
            store = self._store if self._number == 0 else find_store(address)
            join(store, self._number, self._config.ranks)
        self._rank = Rank(self._config, **settings)

    async def run(
        self,
        followers: list[Any],
        broker: Any,
        broadcaster: Any,
        *,
        version: int,
        steps: int,
        checkpoints: str,
        weight_sync: WeightSyncConfig,
    ) -> int:
        """Rank 0: trains to the last step or to `stop`; the version reached, its weights published.

        Published weights are kept until this process ends, so that actors can still take them.
        """
        from learner.learner import Learner
        from learner.ranks.ray_leader import RankZero
        from weight_sync.factory import make_publisher

        state = self._rank.state
        if version != (state.version if state else 0):
            raise LearnerError(
                f"training was to go on at version {version}, but the weights are those of "
                f"{f'version {state.version}' if state else 'the initial model'}"
            )
        self._publisher = make_publisher(weight_sync, broadcaster)
        lead = RankZero(
            self._rank, followers, self._call, self._publisher, checkpoints=Path(checkpoints)
        )
        learner = self._learner = Learner(
            lead,
            broker,
            steps=steps,
            checkpoint_every=self._config.checkpoint_every,
            start_version=version,
            totals=state.totals if state else None,
            observe=self._observe,
        )
        reached = await learner.run(self._stop)
        await self._call(self._publisher.flush, weight_sync.timeout_seconds)
        return reached

    async def serve_metrics(self, host: str) -> str:
        """Rank 0: shows `metrics.LearnerMetrics` until the process ends; host:port."""
        from learner.metrics import LearnerMetrics
        from queues.runtime.prometheus import public_address, serve

        self._metrics = LearnerMetrics()
        port = serve([self._metrics], host=host)
        return public_address(host, port, ray.util.get_node_ip_address())

    def _observe(self, row: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.observe(row)

    async def stop(self) -> None:
        """Rank 0: ends `run` at the next batch boundary, with a checkpoint."""
        self._stop.set()

    async def paused(self) -> str | None:
        """Why this rank waits for room on a disk, if it does; answered while it works."""
        return full_disk.paused()

    async def watch(self) -> None:
        """Another rank: never returns; raises what this rank raised."""
        await self._failed

    async def update(self, payloads: list[Any], version: int) -> None:
        """Takes part in training a batch, as `ray_broker.share` made it."""
        await self._follow(self._rank.update, [memoryview(each) for each in payloads], version)

    async def gather(self) -> None:
        """Takes part in gathering the weights."""
        await self._follow(self._rank.gather)

    async def write(self, temporary: str) -> None:
        """Takes part in writing a checkpoint."""
        await self._follow(self._rank.write, temporary)

    async def _follow(self, work: Callable[P, Any], *args: P.args, **options: P.kwargs) -> None:
        try:
            await self._call(work, *args, **options)
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise

    async def _call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **options))
