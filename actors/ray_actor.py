"""A rollout actor as a Ray actor: builds the parts of one engine and runs them.

    broadcaster ─▶ Receiver ─▶ engine ◀─ RolloutRunner ◀─ RolloutWorker ◀─▶ broker
                      └────────── on_version ──────────────▶┘

Ray never restarts the actor by itself: it would come back without weights and without the calls
that were running. The driver's supervisor makes another one.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Never

import ray

from actors.assembly import build_engine, build_rewards, build_runner, make_pool
from actors.engines.model_folder import context_length, load_tokenizer
from actors.engines.prober import Prober
from actors.engines.protocol import EngineSpec, RolloutEngine
from actors.engines.vllm_processes import import_beside
from actors.errors import root_error
from actors.rewards.learned import TextScorer
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.rollout_worker import RolloutWorker
from actors.rollout.runner import RolloutRunner
from headway.errors import HeadwayError
from headway.metrics import MetricsAccess
from headway.output_limits import keep_logs_small
from headway.ray_process import keep_title, serve_metrics
from headway.roles import ProcessName, Role
from queues.errors import QueueClosed
from queues.protocols import WorkQueue
from queues.records import Purpose, rollouts_at_once
from weight_sync.direct.direct_receiver import DirectReceiver
from weight_sync.factory import make_transport
from weight_sync.open_files import allow_open_files
from weight_sync.ray_broadcaster import BroadcasterClient
from weight_sync.receive.receiver import Receiver, ReceiverOptions

MAX_CONCURRENCY = 16
"""Concurrent calls: start, run, stop, and several of statistics."""
PINGS = "pings"
"""Ray's concurrency group of `RolloutActor.ping`."""


@dataclass(frozen=True, kw_only=True)
class ActorSpec(EngineSpec):
    """Everything that the process of a rollout actor is made from."""

    group_size: int
    """Rollouts of a training group."""
    heartbeat_seconds: float
    """Interval between renewals of the leases."""
    broker: WorkQueue
    """A client that can be sent to other processes, as the next two."""
    broadcaster: BroadcasterClient
    reward_model_client: TextScorer | None = None
    metrics: MetricsAccess | None = None
    """Where it serves its metrics, and to whom; None serves none."""
    purpose: Purpose | None = None
    """As `RolloutWorker.purpose`."""
    pinned_seconds: float = 600.0


def create_actor(spec: ActorSpec, actor: "type[RolloutActor] | None" = None, **options: Any) -> Any:
    """Start the process of an `actor`, by default `RolloutActor`; `options` are those of Ray."""
    remote = ray.remote(concurrency_groups={PINGS: 1})(actor or RolloutActor).options(
        **{
            "num_cpus": spec.config.cpus,
            "num_gpus": spec.config.gpus,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            **options,
        }
    )
    return remote.remote(spec)


@dataclass(frozen=True, slots=True)
class ActorParts:
    """The parts of an actor once it is built."""

    engine: RolloutEngine
    runner: RolloutRunner
    worker: RolloutWorker
    receiver: Receiver | DirectReceiver


class RolloutActor:
    """One engine with everything that keeps it busy and up to date.

    The constructor starts nothing: Ray would report an error raised there as a lost actor.
    """

    def __init__(self, spec: ActorSpec) -> None:
        self._spec, self._name = spec, ProcessName(Role.ACTOR, spec.index)
        self._statistics = ActorStatistics(self._name.engine_id)
        self._pool = make_pool(spec.config)
        self._stop = asyncio.Event()
        self.parts: ActorParts | None = None
        self._works = False
        self._title: asyncio.Task[Never] | None = None

    def __repr__(self) -> str:
        return str(self._name)

    def _state(self) -> str:
        """Describe what it does, for the title of its process."""
        version, running = self._statistics.version, self._statistics.occupancy.running
        if self.parts is None:
            doing = "loads the model"
        elif version is None:
            doing = "waits for its first weights"
        else:
            doing = f"version {version}, " + (f"{running} rollouts" if running else "idle")
        return f"{self}: {doing}"

    async def start(self) -> None:
        """Build the parts and load the model; the engine is STALE until its first version.

        Raises InputError for a setting, model or user code that cannot be used, and EngineDied.
        """
        keep_logs_small()
        allow_open_files()  # first: the engine has the limit that it begins with
        if self._spec.config.engine == "vllm":
            import_beside(self._spec)
        gc.disable()  # while it imports, of which collecting would be a fifth
        self._title = asyncio.create_task(keep_title("RolloutActor", self._state))
        if access := self._spec.metrics:
            from actors.metrics import ActorMetrics, EngineMetrics

            engine = [EngineMetrics()] if self._spec.engine_metrics else []
            collectors = [ActorMetrics(self._statistics), *engine]
            self._statistics.metrics = serve_metrics(collectors, access)
        parts = await asyncio.to_thread(self._build)
        await parts.engine.start()
        try:
            await parts.runner.start()
        except BaseException:
            await parts.engine.close()
            raise
        gc.collect()
        gc.freeze()  # collecting what was loaded again would take most of a second
        gc.enable()
        self.parts = parts

    async def run(self) -> None:
        """Follow the weights and work until `stop`, or until the run is over.

        Raises EngineDied, and HeadwayError if the broker is gone or the engine cannot take the
        weights.
        """
        if self.parts is None:
            raise HeadwayError(f"{self._statistics.engine_id} must be started before it runs")
        parts, self._works = self.parts, True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.receiver.run(self._stop))
                await parts.worker.run(self._stop)
                self._stop.set()
        except BaseExceptionGroup as errors:
            error = root_error(errors)
            if not isinstance(error, QueueClosed):  # the broker left while a version arrived
                raise error from errors
        finally:
            parts.receiver.close()
            self._pool.close()
            await parts.runner.close()
            await parts.engine.close()

    async def update(self, step: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Call a method of `DirectReceiver`, for the learner (`RayEngineLink`)."""
        receiver = self.parts and self.parts.receiver
        if not isinstance(receiver, DirectReceiver):
            raise HeadwayError(f"{self._statistics.engine_id} takes no weights directly")
        return await step(receiver, *arguments)

    async def resend(self) -> None:
        """Have the engine take the newest weights again, whole (`Receiver.resend`)."""
        receiver = self.parts and self.parts.receiver
        if not isinstance(receiver, Receiver):
            raise HeadwayError(f"{self._statistics.engine_id} cannot fetch weights again")
        await receiver.resend()

    async def statistics(self) -> dict[str, Any]:
        """See `ActorStatistics.statistics`; can be called at any time."""
        return self._statistics.statistics()

    @ray.method(concurrency_group=PINGS)
    async def ping(self) -> None:
        """Return at once, in a thread of its own, so that user code which blocks is no hang."""

    async def stop(self, seconds: float) -> None:
        """End `run`, begun or not, and wait until rollouts are saved, for at most `seconds`."""
        if self.parts is not None:
            self.parts.worker.hand_over_seconds = seconds
        self._stop.set()
        if self._works and self.parts is not None:
            await self.parts.worker.left.wait()

    def _build(self) -> ActorParts:
        """Build everything but the running engine; blocks while it reads the model folder."""
        spec, config = self._spec, self._spec.config
        rewards = build_rewards(
            config, pool=self._pool, reward_model_client=spec.reward_model_client
        )
        tokenizer = load_tokenizer(spec.model_path)
        max_model_len = config.max_model_len or context_length(spec.model_path)
        engine = build_engine(spec, tokenizer, max_model_len)
        runner = build_runner(
            self._statistics.engine_id, config, engine, tokenizer, max_model_len, rewards
        )
        runner.work, runner.statistics = spec.broker, self._statistics.agents
        self._statistics.outages = runner.outages

        async def interrupt() -> None:
            await engine.interrupt()
            runner.interrupt()

        worker = RolloutWorker(
            self._statistics,
            spec.broker,
            runner.run,
            interrupt=interrupt,
            score_group=runner.score_group,
            max_concurrent_rollouts=config.max_concurrent_rollouts,
            largest_group=rollouts_at_once(spec.group_size, config.greedy_baseline),
            heartbeat_seconds=spec.heartbeat_seconds,
            purpose=spec.purpose,
            pinned_seconds=spec.pinned_seconds,
        )
        return ActorParts(engine, runner, worker, self._receiver(engine, worker))

    def _receiver(self, engine: Any, worker: RolloutWorker) -> Receiver | DirectReceiver:
        config, broadcaster = self._spec.weight_sync, self._spec.broadcaster
        prober = Prober(self._statistics.engine_id, engine, broadcaster, config.probe)

        async def on_version(version: int) -> None:
            prober.begin(version)
            await worker.on_version(version)  # which may last as long as an evaluation

        if config.staged:
            return Receiver(
                self._statistics.engine_id,
                engine,
                broadcaster,
                make_transport(config),
                on_version,
                ReceiverOptions(
                    expected=engine.inventory(),
                    timeout=config.timeout_seconds,
                    keep_base=config.codec == "delta",
                ),
            )

        async def join() -> None:
            await broadcaster.join(
                self._statistics.engine_id,
                ray.get_runtime_context().current_actor,
                self._spec.config.tensor_parallel_size,
            )

        return DirectReceiver(
            engine,
            join,
            expected=engine.inventory(),
            on_version=on_version,
            # Longer than the learner's own timeout, whose error names the cause.
            timeout=2 * config.timeout_seconds,
        )
