"""The learner as a Ray actor: one rank on DeepSpeed, fed by the broker, publishing to actors."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import ray

from learner.config import LearnerConfig
from learner.errors import InputError
from weight_sync.config import WeightSyncConfig


def bind(cores: set[int]) -> None:
    """Keeps every thread of this process, and those it will start, on some cores.

    Raises:
        InputError: This machine does not have them.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    except OSError:
        there = sorted(os.sched_getaffinity(0))
        raise InputError(f"learner.cores = {sorted(cores)}, but there are only {there}") from None


def cores_of(text: str) -> set[int]:
    """Core numbers of a list such as "0,2-5"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


class LearnerActor:
    """Loads the policy in `start`, trains in `run`. Created by `create_learner`."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()

    async def start(self, model_path: str, *, seed: int, steps: int, temperature: float) -> None:
        """Loads model and optimizer, on the cores of the recipe.

        Raises:
            InputError: The model cannot be trained, or the cores do not exist.
        """
        if self._config.cores is not None:
            bind(cores_of(self._config.cores))
        await asyncio.to_thread(self._load, model_path, seed, steps, temperature)

    def _load(self, model_path: str, seed: int, steps: int, temperature: float) -> None:
        import torch

        from learner.deepspeed_engine import DeepSpeedEngine
        from learner.model import load_policy
        from learner.update import Updater

        config = self._config
        torch.manual_seed(seed)
        policy = load_policy(
            model_path,
            dtype=config.dtype,
            attention=config.attention,
            chunk=config.logprob_chunk,
        )
        self._engine = DeepSpeedEngine(
            policy,
            config,
            model_path=model_path,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            total_steps=steps,
            temperature=temperature,
        )
        self._updater = Updater(self._engine, config)

    async def run(
        self,
        broker: Any,
        broadcaster: Any,
        *,
        steps: int,
        checkpoints: str,
        weight_sync: WeightSyncConfig,
    ) -> int:
        """Trains to the last step or to `stop`; the version reached, its weights published.

        Published weights are kept until this process ends, so that actors can still take them.
        """
        from learner.learner import Learner
        from weight_sync.publisher import Publisher
        from weight_sync.transports.shared_memory import SharedMemoryTransport

        self._publisher = Publisher(
            SharedMemoryTransport(),
            broadcaster.announce,
            weight_sync.bucket_bytes,
            timeout=weight_sync.timeout_seconds,
        )
        learner = Learner(
            self._updater,
            broker,
            self._publisher.publish,
            steps=steps,
            save=partial(self._save, broker, Path(checkpoints)),
            checkpoint_every=self._config.checkpoint_every,
        )
        version = await learner.run(self._stop)
        await asyncio.to_thread(self._publisher.flush, weight_sync.timeout_seconds)
        return version

    async def _save(self, broker: Any, root: Path, version: int) -> None:
        from learner.checkpoint import save_checkpoint

        state = {"advantage_state": self._updater.advantage_state}
        path = await asyncio.to_thread(save_checkpoint, self._engine, root, version, state)
        await broker.commit_checkpoint(version, f"{root.name}/{path.name}")

    async def stop(self) -> None:
        """Ends `run` at the next batch boundary, with a checkpoint."""
        self._stop.set()


def threads_of(config: LearnerConfig) -> int:
    """Torch threads of one rank, which is also the number of CPUs it reserves."""
    return config.threads or (len(cores_of(config.cores)) if config.cores else 1)


def create_learner(config: LearnerConfig, **options: Any) -> Any:
    """Starts the learner's process on the cluster; returns its Ray handle.

    Args:
        config: Section `[learner]`.
        **options: Ray actor options such as `scheduling_strategy`.
    """
    threads = threads_of(config)
    remote = ray.remote(LearnerActor).options(
        num_cpus=threads,
        num_gpus=config.gpus,
        max_concurrency=8,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        **options,
    )
    return remote.remote(config)
