"""Rank 0 as the leader: what it does, the other ranks do at the same time (a `learner.Trainer`).

The batch goes to the object store once. A follower that fails fails the operation at once, though
this rank may still hang in it. Leaves out what the operations are (`rank`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from learner.engine import checkpoint
from learner.full_disk import wait_for_room
from learner.ranks.rank import Rank
from learner.ranks.ray_failure import failure
from queues.records import Payload
from queues.runtime.ray_payloads import to_arrays
from weight_sync.publish.background_publisher import BackgroundPublisher

Call = Callable[..., Awaitable[Any]]


class RankZero:
    """All ranks of a learner, led by this one."""

    def __init__(
        self,
        rank: Rank,
        followers: Sequence[Any],
        call: Call,
        publisher: BackgroundPublisher,
        *,
        checkpoints: Path,
    ) -> None:
        """Takes its collaborators.

        Args:
            rank: This process's own, 0.
            followers: Handles of ranks 1, 2, ...
            call: Runs a function in the thread where `rank` may be used.
            publisher: Takes the weights.
            checkpoints: Folder of all checkpoints.
        """
        self._rank = rank
        self._followers = followers
        self._call = call
        self._publisher = publisher
        self._skipped = 0
        """Of the versions that the publisher skipped, those that were told of."""
        self._checkpoints = checkpoints

    async def update(self, payloads: Sequence[Payload], version: int) -> dict[str, Any]:
        """See `Trainer.update`."""
        shared = ray.put(to_arrays(payloads)) if self._followers else None
        calls = [follower.update.remote(shared, version) for follower in self._followers]
        statistics: dict[str, Any] = await self._together(
            self._call(self._rank.update, payloads, version), calls
        )
        skipped, self._skipped = self._publisher.skipped - self._skipped, self._publisher.skipped
        return {**statistics, "versions_skipped": skipped}

    async def publish(self, version: int) -> str:
        """See `Trainer.publish`."""
        gathering = self._followers if self._rank.engine.gathers else []
        calls = [follower.gather.remote() for follower in gathering]
        checksum: str = await self._together(
            self._call(lambda: self._publisher.publish(version, self._rank.weights())), calls
        )
        return checksum

    async def save(self, version: int, *, cursor: str | None, totals: Mapping[str, int]) -> str:
        """See `Trainer.save`.

        Waits first for as much room on the disk as the last checkpoint took, and what a killed
        process left of one is removed before; a disk that fills up later is waited for by the rank
        that writes (`full_disk`).
        """
        await self._call(self._make_room)
        return await self._write(version, cursor, totals)

    def _make_room(self) -> None:
        root = self._checkpoints
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_leftovers(root)
        wait_for_room(root, checkpoint.newest_size(root))

    async def _write(self, version: int, cursor: str | None, totals: Mapping[str, int]) -> str:
        root, config = self._checkpoints, self._rank.config
        temporary = str(await self._call(checkpoint.prepare, root, version))
        calls = [follower.write.remote(temporary) for follower in self._followers]
        await self._together(self._call(self._rank.write, temporary), calls)
        state = checkpoint.State(
            version=version,
            saved_at=time.time(),
            optimizer_steps=self._rank.engine.steps_taken,
            ranks=config.ranks,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            cursor=cursor,
            objective_state=self._rank.updater.objective.state,
            totals=dict(totals),
        )
        folder = await self._call(checkpoint.finish, root, state)
        return f"{root.name}/{folder.name}"

    async def prune(self, version: int) -> None:
        """See `Trainer.prune`."""
        config = self._rank.config
        await self._call(
            checkpoint.prune,
            self._checkpoints,
            newest=version,
            keep=config.keep_checkpoints,
            keep_seconds=config.keep_checkpoint_hours * 3600,
        )

    async def _together(self, own: Awaitable[Any], calls: Sequence[Any]) -> Any:
        """This rank's result, when all are done; the first failure at once."""
        followers = (_named(rank, call) for rank, call in enumerate(calls, start=1))
        return (await asyncio.gather(own, *followers))[0]


async def _named(rank: int, call: Any) -> None:
    try:
        await call
    except RayError as error:
        raise failure(rank, error) from error
