"""A rollout actor as a process of Ray: builds the parts of one engine and runs them.

    broadcaster ─▶ Receiver ─▶ engine ◀─ EpisodeRunner ◀─ RolloutWorker ◀─▶ broker
                      └────────── on_version ──────────────▶┘

The only file of the package that imports Ray. Ray never restarts the actor by itself: it would come
back without weights and without its calls. Whoever created it makes another one.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Never

import ray

from actors.config import ActorsConfig
from actors.engines.model_folder import context_length, load_tokenizer, stated_dtype, weight_shapes
from actors.engines.protocol import RolloutEngine, SamplingParameters
from actors.environments.registry import load_environment
from actors.errors import ActorsError, InputError
from actors.rewards import RewardPool, Rewards, load_rewards, load_shaping
from actors.rewards.learned import Judge
from actors.rollout.actor_statistics import ActorStatistics, engine_id_of
from actors.rollout.chat_rendering import Renderer
from actors.rollout.episode import EpisodeRunner
from actors.rollout.failures import root_error
from actors.rollout.rollout_worker import RolloutWorker
from queues.errors import QueueClosed
from queues.protocols import WorkQueue
from queues.records import Purpose
from queues.runtime.ray_process_title import keep_title
from weight_sync.config import WeightSyncConfig
from weight_sync.direct.receiver import DirectReceiver
from weight_sync.factory import make_transport
from weight_sync.ray_broadcaster import BroadcasterClient
from weight_sync.receive.receiver import Receiver
from weight_sync.vllm.transfer import BACKEND

MAX_CONCURRENCY = 16
"""Calls that may be open at once: start, run, stop, and statistics by several."""


def create_actor(
    index: int,
    *,
    config: ActorsConfig,
    weight_sync: WeightSyncConfig,
    model_path: str,
    seed: int,
    group_size: int,
    heartbeat_seconds: float,
    broker: WorkQueue,
    broadcaster: BroadcasterClient,
    judge: Judge | None = None,
    metrics_host: str | None = None,
    engine_metrics: bool = False,
    purpose: Purpose | None = None,
    pinned_seconds: float = 600.0,
    **options: Any,
) -> Any:
    """Starts the process of a rollout actor on the cluster.

    Args:
        index: Number among the actors, from 0.
        config: Section `[actors]`.
        weight_sync: Section `[weight_sync]`.
        model_path: Local folder or hub name.
        seed: Of the run.
        group_size: Rollouts of a training group.
        heartbeat_seconds: How often leases are renewed.
        broker: A client that can be sent to other processes.
        broadcaster: Likewise.
        judge: Likewise; what the reward `reward_model` asks.
        metrics_host: Address of its node to show metrics at; None: nowhere.
        engine_metrics: Show the engine's own there too.
        purpose: Of what it leases; None leases for either. One that only evaluates takes no new
            version before nothing is left to evaluate at the one it has.
        pinned_seconds: Longest that a version is kept from it.
        **options: Ray actor options such as `scheduling_strategy`.

    Returns:
        A Ray handle with the methods of `RolloutActor`.
    """
    remote = ray.remote(RolloutActor).options(
        **{
            "num_cpus": config.cpus,
            "num_gpus": config.gpus,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            **options,
        }
    )
    return remote.remote(
        index,
        config=config,
        weight_sync=weight_sync,
        model_path=model_path,
        seed=seed,
        group_size=group_size,
        heartbeat_seconds=heartbeat_seconds,
        broker=broker,
        broadcaster=broadcaster,
        judge=judge,
        metrics_host=metrics_host,
        engine_metrics=engine_metrics,
        purpose=purpose,
        pinned_seconds=pinned_seconds,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What an actor consists of once it was built."""

    engine: RolloutEngine
    worker: RolloutWorker
    receiver: Receiver | DirectReceiver


class RolloutActor:
    """One engine with everything that keeps it busy and up to date; arguments as `create_actor`.

    The constructor only keeps them: what raises there reaches nobody as what it is.
    """

    def __init__(
        self,
        index: int,
        *,
        config: ActorsConfig,
        weight_sync: WeightSyncConfig,
        model_path: str,
        seed: int,
        group_size: int,
        heartbeat_seconds: float,
        broker: WorkQueue,
        broadcaster: BroadcasterClient,
        judge: Judge | None = None,
        metrics_host: str | None = None,
        engine_metrics: bool = False,
        purpose: Purpose | None = None,
        pinned_seconds: float = 600.0,
    ) -> None:
        self._index = index
        self._config = config
        self._weight_sync = weight_sync
        self._model_path = model_path
        self._seed = seed
        self._group_size = group_size
        self._heartbeat_seconds = heartbeat_seconds
        self._broker = broker
        self._broadcaster = broadcaster
        self._judge = judge
        self._metrics_host = metrics_host
        self._engine_metrics = engine_metrics and metrics_host is not None
        self._purpose, self._pinned_seconds = purpose, pinned_seconds
        self._tally = ActorStatistics(engine_id_of(index))
        self._pool = RewardPool(config.reward_processes, config.reward_memory_gib)
        self._stop = asyncio.Event()
        self._parts: _Parts | None = None
        self._works = False
        self._title: asyncio.Task[Never] | None = None

    def __repr__(self) -> str:
        return f"actor-{self._index}"

    def _state(self) -> str:
        """What it does, for the title of its process."""
        version, running = self._tally.version, self._tally.occupancy.running
        if self._parts is None:
            doing = "loads the model"
        elif version is None:
            doing = "waits for its first weights"
        else:
            doing = f"version {version}, " + (f"{running} rollouts" if running else "idle")
        return f"{self}: {doing}"

    async def start(self) -> None:
        """Builds the parts and loads the model; the engine is STALE until the first version comes.

        Raises:
            InputError: A setting, the model, or code of the user's cannot be used.
            EngineDied: The engine did not start.
        """
        self._title = asyncio.create_task(keep_title("RolloutActor", self._state))
        self._show_metrics()
        parts = await asyncio.to_thread(self._build)
        await parts.engine.start()
        gc.collect()
        gc.freeze()  # what was loaded stays: looking through it again would take most of a second
        self._parts = parts

    async def run(self) -> None:
        """Follows the weights and works until `stop`, or until the run is over.

        Raises:
            EngineDied: The engine is gone.
            QueuesError: The broker is.
            WeightSyncError: The engine cannot take the weights, or was left in an unknown state.
        """
        if self._parts is None:
            raise ActorsError(f"{self._tally.engine_id} was told to run before it had started")
        parts, self._works = self._parts, True
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
            await parts.engine.close()

    async def weights(self, call: str, *arguments: Any) -> int | None:
        """A call of `direct.EngineLink`, by a learner that this has joined: `DirectReceiver`'s.

        Raises:
            ActorsError: The actor has no such receiver.
            WeightSyncError: See there.
        """
        receiver = self._parts and self._parts.receiver
        if not isinstance(receiver, DirectReceiver):
            raise ActorsError(f"{self._tally.engine_id} takes no weights directly")
        calls: dict[str, Callable[..., Awaitable[int | None]]] = {
            "pause": receiver.pause,
            "transfer": receiver.transfer,
            "resume": receiver.resume,
            "give_up": receiver.give_up,
        }
        return await calls[call](*arguments)

    async def statistics(self) -> dict[str, Any]:
        """See `ActorStatistics.statistics`; answers at any time."""
        return self._tally.statistics()

    async def stop(self) -> None:
        """Ends `run` within seconds, even one that has not begun; what is running is saved.

        Returns when that is done, with the engine still to be closed.
        """
        self._stop.set()
        if self._works and self._parts is not None:
            await self._parts.worker.left.wait()

    def _show_metrics(self) -> None:
        if self._metrics_host is None:
            return
        from actors.metrics import ActorMetrics, EngineMetrics
        from queues.runtime.prometheus import public_address, serve

        engine = [EngineMetrics()] if self._engine_metrics else []
        port = serve([ActorMetrics(self._tally), *engine], host=self._metrics_host)
        node = ray.util.get_node_ip_address()
        self._tally.metrics = public_address(self._metrics_host, port, node)

    def _rewards(self) -> tuple[Rewards, Rewards]:
        """Of training and of held-out rollouts; what is in both is one, with one budget."""
        config = self._config
        heldout = config.heldout_reward or config.reward
        rewards = load_rewards(
            [*config.reward, *heldout],
            timeout=config.reward_timeout_seconds,
            options=config.reward_options,
            weights=config.reward_weights,
            judge=self._judge,
            pool=self._pool,
            code_execution=config.code_execution,
        )
        return rewards.only(config.reward), rewards.only(heldout)

    def _build(self) -> _Parts:
        """Everything but the running engine; blocks while it reads the model folder."""
        config = self._config
        rewards, heldout_rewards = self._rewards()
        tokenizer = load_tokenizer(self._model_path)
        max_model_len = config.max_model_len or context_length(self._model_path)
        engine = build_engine(
            self._index,
            config,
            self._weight_sync,
            self._model_path,
            self._seed,
            max_model_len,
            tokenizer,
            counts=self._engine_metrics,
        )
        episodes = build_episodes(
            self._tally.engine_id,
            config,
            engine,
            tokenizer,
            max_model_len,
            rewards=rewards,
            heldout_rewards=heldout_rewards,
        )
        worker = RolloutWorker(
            self._tally,
            self._broker,
            episodes.run,
            interrupt=engine.interrupt,
            max_concurrent_rollouts=config.max_concurrent_rollouts,
            largest_group=self._group_size + config.greedy_baseline,
            heartbeat_seconds=self._heartbeat_seconds,
            purpose=self._purpose,
            pinned_seconds=self._pinned_seconds,
        )
        return _Parts(engine, worker, self._receiver(engine, worker))

    def _receiver(self, engine: Any, worker: RolloutWorker) -> Receiver | DirectReceiver:
        """How weights come to the engine."""
        config = self._weight_sync
        if config.staged:
            return Receiver(
                self._tally.engine_id,
                engine,
                self._broadcaster,
                make_transport(config),
                expected=engine.inventory(),
                on_version=worker.on_version,
                timeout=config.timeout_seconds,
                keep_base=config.codec == "delta",
            )

        async def join() -> None:
            await self._broadcaster.join(
                self._tally.engine_id,
                ray.get_runtime_context().current_actor,
                self._config.tensor_parallel_size,
            )

        return DirectReceiver(
            engine,
            join,
            expected=engine.inventory(),
            on_version=worker.on_version,
            timeout=2 * config.timeout_seconds,  # the learner, which knows why, speaks first
        )


def build_episodes(
    engine_id: str,
    config: ActorsConfig,
    engine: RolloutEngine,
    tokenizer: Any,
    max_model_len: int,
    *,
    rewards: Rewards,
    heldout_rewards: Rewards,
) -> EpisodeRunner:
    """What turns leases into rollouts on one engine, as the section `[actors]` says."""
    return EpisodeRunner(
        engine_id=engine_id,
        engine=engine,
        renderer=Renderer(tokenizer, config.chat_template),
        environment=config.environment,
        new_environment=load_environment(
            config.environment, config.environment_options, code_execution=config.code_execution
        ),
        environment_timeout=config.environment_timeout_seconds,
        max_turns=config.max_turns,
        rewards=rewards,
        heldout_rewards=heldout_rewards,
        shaping=load_shaping(config),
        sampling=SamplingParameters(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            top_p=config.top_p,
            top_k=config.top_k,
        ),
        max_model_len=max_model_len,
        timeout=config.rollout_timeout_seconds,
    )


def build_engine(
    index: int,
    config: ActorsConfig,
    weight_sync: WeightSyncConfig,
    model_path: str,
    seed: int,
    max_model_len: int,
    tokenizer: Any,
    *,
    initial_version: int | None = None,
    counts: bool = False,
) -> RolloutEngine:
    """The engine of one actor, not started.

    Args:
        index: Number among the actors, from 0.
        config: Section `[actors]`.
        weight_sync: Section `[weight_sync]`.
        model_path: Local folder or hub name.
        seed: Of the run.
        max_model_len: Longest rollout in tokens.
        tokenizer: Of transformers.
        initial_version: Of the weights in the model folder; None waits for the first update.
        counts: vLLM counts what it does, for `actors.metrics.EngineMetrics`.

    Raises:
        InputError: Options that the scripted engine does not have.
    """
    if config.engine == "scripted":
        from actors.engines.scripted import ScriptedEngine

        options = {
            "vocabulary": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "initial_version": initial_version,
        }
        try:
            return ScriptedEngine(
                weight_shapes(model_path), **{**options, **config.scripted_options}
            )
        except TypeError as error:
            raise InputError(f"actors.scripted_options: {error}") from error
    from actors.engines.vllm import VllmEngine

    return VllmEngine(
        model_path,
        # vLLM's own "auto" makes bfloat16 of float32.
        dtype=stated_dtype(model_path) if config.dtype == "auto" else config.dtype,
        float32_head=config.float32_head,
        max_model_len=max_model_len,
        max_num_seqs=config.max_concurrent_rollouts,
        cores=config.cores[index] if config.cores else None,
        kv_cache_gib=config.kv_cache_gib,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=config.enforce_eager,
        seed=seed * config.count + index,
        update_mode=weight_sync.update_mode,
        clear_cache=weight_sync.clear_cache,
        weight_backend=BACKEND if weight_sync.staged else weight_sync.transport,
        initial_version=initial_version,
        counts=counts,
    )
