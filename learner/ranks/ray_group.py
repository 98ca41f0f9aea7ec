"""The learner group as its driver sees it: N processes behind one object.

    driver ─start─▶ rank 0, 1, …           load at once, meet in a store of rank 0
    driver ─run──▶ rank 0 ─update, gather, write─▶ rank 1, …
       └──watch──────────────────────────────────▶ rank 1, …   their failures, at once

The first rank that dies or raises ends the group, by name. Leaves out what ranks do (`rank`), and
which of them does it when (`ray_lead`).
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from learner.config.cpu_affinity import cpus_of, threads_of
from learner.config.learner import LearnerConfig
from learner.ranks.heap import KEEP_FREED_MEMORY
from learner.ranks.ray_failure import explains, failure
from learner.ranks.ray_rank import RankActor
from weight_sync.config import WeightSyncConfig

GRACE_SECONDS = 5.0
"""How long a lost connection waits for the death that explains it."""
ANSWER_SECONDS = 5.0
"""Deadline of a rank's answer about itself."""


class LearnerGroup:
    """The ranks of a learner; see `create_learner`."""

    def __init__(self, ranks: list[Any]) -> None:
        self._ranks = ranks

    @property
    def handles(self) -> list[Any]:
        """Of the ranks' processes in Ray, in order."""
        return list(self._ranks)

    async def start(
        self, model_path: str, *, checkpoint: str | None, seed: int, steps: int, temperature: float
    ) -> None:
        """Loads the policy in all ranks at once.

        Args:
            model_path: Model folder or hub name; the tokenizer and the shape come from it always.
            checkpoint: A folder of a checkpoint to go on from, or None: the weights of the model.
            seed: Of the learner's random state, which a checkpoint restores.
            steps: Batches of the whole run.
            temperature: At which actors sample.

        Raises:
            LearnerError: A rank died or cannot be loaded; see `RankFailed`.
        """
        address = None
        if len(self._ranks) > 1:
            [address] = await self._first_failure({0: self._ranks[0].open_store.remote()})
        settings = {
            "model_path": model_path,
            "checkpoint_path": checkpoint,
            "seed": seed,
            "steps": steps,
            "temperature": temperature,
        }
        await self._first_failure(
            {i: rank.start.remote(address, **settings) for i, rank in enumerate(self._ranks)}
        )

    async def run(
        self,
        broker: Any,
        broadcaster: Any,
        *,
        version: int,
        steps: int,
        checkpoints: str,
        weight_sync: WeightSyncConfig,
    ) -> int:
        """Trains from `version`, which the loaded weights are, to the last step or to `stop`.

        Args:
            broker: Gives batches.
            broadcaster: Announces weights.
            version: 0, or that of the checkpoint.
            steps: The last version.
            checkpoints: Folder of all checkpoints.
            weight_sync: Its section of the recipe.

        Returns:
            The version reached; its weights are published and its checkpoint is committed.

        Raises:
            LearnerError: A rank died or raised; the others are ended.
        """
        lead, *followers = self._ranks
        running = lead.run.remote(
            followers,
            broker,
            broadcaster,
            version=version,
            steps=steps,
            checkpoints=checkpoints,
            weight_sync=weight_sync,
        )
        watched = {i: rank.watch.remote() for i, rank in enumerate(followers, start=1)}
        [reached] = await self._first_failure({0: running}, watched)
        return int(reached)

    async def serve_metrics(self, host: str) -> str:
        """Shows metrics of rank 0 at this address of its node; host:port."""
        found: str = await self._ranks[0].serve_metrics.remote(host)
        return found

    async def paused(self) -> str | None:
        """Why a rank waits for room on a disk; None where none does, or none answers in time."""
        asked = [asyncio.ensure_future(rank.paused.remote()) for rank in self._ranks]
        answered, late = await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for call in late:
            call.cancel()
        reasons = (call.result() for call in answered if call.exception() is None)
        return next((reason for reason in reasons if reason), None)

    def stop(self) -> None:
        """Ends `run` at the next batch boundary, with a checkpoint; returns at once."""
        with suppress(RayError):
            self._ranks[0].stop.remote()

    def kill(self) -> None:
        """Ends every rank, whatever it is doing."""
        for rank in self._ranks:
            ray.kill(rank)

    async def _first_failure(
        self, needed: Mapping[int, Any], watched: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """The results of the needed calls of ranks, or the first failure of any call.

        A rank that lost its connection fails like others do whose fault it was: the one whose
        failure explains it is named instead, where it shows soon.
        """
        tasks = {
            asyncio.ensure_future(call): rank
            for rank, call in [*needed.items(), *(watched or {}).items()]
        }
        waited = list(tasks)[: len(needed)]
        pending = set(tasks)
        try:
            while not all(task.done() for task in waited):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() for task in done):
                    await self._fail(tasks)
            return [task.result() for task in waited]
        finally:
            for task in pending:
                task.cancel()

    async def _fail(self, tasks: "Mapping[asyncio.Future[Any], int]") -> None:
        """Ends the group and raises the failure that explains it best."""
        deadline = asyncio.get_running_loop().time() + GRACE_SECONDS
        while True:
            failed = [
                (error, rank)
                for task, rank in tasks.items()
                if task.done() and (error := task.exception())
            ]
            error, rank = min(failed, key=lambda found: not explains(found[0]))
            pending = [task for task in tasks if not task.done()]
            left = deadline - asyncio.get_running_loop().time()
            if explains(error) or not pending or left <= 0:
                break
            await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        self.kill()
        raise failure(rank, error) from error


def create_learner(
    config: LearnerConfig, options_of: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> LearnerGroup:
    """Starts the learner's processes on the cluster.

    Args:
        config: Section `[learner]`.
        options_of: Ray actor options of a rank, such as `scheduling_strategy`.
    """
    variables = {"OMP_NUM_THREADS": str(threads_of(config))}
    if not config.gpus:
        variables |= KEEP_FREED_MEMORY
    ranks = [
        ray.remote(RankActor).options(
            num_cpus=cpus_of(config),
            num_gpus=config.gpus,
            max_concurrency=8,
            runtime_env={"env_vars": variables},
            **options_of(rank),
        )
        for rank in range(config.ranks)
    ]
    return LearnerGroup([each.remote(config, rank) for rank, each in enumerate(ranks)])
