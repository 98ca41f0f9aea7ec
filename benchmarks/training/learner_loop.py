"""The time of a learner's loop between the batches that it computes, when none is waited for.

    take ─▶ decode ─▶ first forward … last step ─▶ publish ─▶ ack ─▶ take ─▶ decode ─▶ first forward
                                              └───────────────── gap ─────────────────┘

The loop, its rank, the publisher and the broker are those of a run, over Ray; the broker has every
group before the first batch. Leaves out actors that fetch the weights.
"""

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.harness.processes import local_ray
from benchmarks.harness.synthetic_load import Size, build
from benchmarks.training.utilisation import ClockedEngine
from deploy.errors import RunFailed
from learner.config.learner import LearnerConfig
from learner.diagnostics.batch_report import BatchReport
from learner.learner import Learner
from learner.model.tiny_tokenizer import tiny_tokenizer
from learner.ranks.rank import Rank
from learner.ranks.ray_leader import Call, RankZero
from learner.ranks.spec import GLIBC_ON_CPU, LearnerSpec
from learner.update import Updater
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerClient, create_broker
from queues.records import Payload, Prompt, RolloutGroup
from queues.schema import encode
from weight_sync.announcements import Announcements
from weight_sync.config import WeightSyncConfig
from weight_sync.factory import make_publisher
from weight_sync.probe import ProbeBudget
from weight_sync.publish.background_publisher import BackgroundPublisher
from weight_sync.ray_broadcaster import create_broadcaster

ENGINE = "engine-0"
Result = TypeVar("Result")


def in_process(work: Callable[..., Result], *arguments: Any, threads: int) -> Result:
    """Return the result of work in a process of its own, with the memory settings of a learner."""
    if not torch.cuda.is_available():
        os.environ.update(GLIBC_ON_CPU)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def clocked_rank(size: Size, folder: Path) -> tuple[Rank, ClockedEngine]:
    """Return the only rank of a learner of random weights, and the clock of its updater."""
    config = LearnerConfig(microbatch_tokens=size.microbatch_tokens, dtype=size.dtype)
    torch.manual_seed(0)
    build(size).to(torch.float32).save_pretrained(folder)
    tiny_tokenizer("0123456789+=", size.longest).save_pretrained(folder)
    rank = Rank(LearnerSpec(config=config, model_path=str(folder), seed=0, steps=1000))
    engine = ClockedEngine(rank.engine, rank.engine.device)
    rank.updater = Updater(engine, config)
    return rank, engine


class ClockedRankZero(RankZero):
    """A rank 0 that notes when each batch was computed, and writes checkpoints if it `saves`."""

    def __init__(
        self,
        clock: ClockedEngine,
        rank: Rank,
        call: Call,
        publisher: BackgroundPublisher,
        broadcaster: Announcements,
        *,
        saves: bool,
    ) -> None:
        super().__init__(rank, [], call, publisher, broadcaster, ProbeBudget("never"))
        self._clock, self._saves = clock, saves
        self.computed: list[tuple[float, float]] = []
        """Begin of the first forward pass and end of the last step of each batch."""

    async def update(self, payloads: Sequence[Payload], version: int) -> BatchReport:
        """See `Trainer.update`."""
        self._clock.restart()
        report = await super().update(payloads, version)
        assert self._clock.first is not None
        self.computed.append((self._clock.first, self._clock.last))
        return report

    async def save(self, version: int, **state: Any) -> Awaitable[str]:
        """See `Trainer.save`."""
        return await super().save(version, **state) if self._saves else asyncio.sleep(0, "")


def gaps(
    rank: Rank,
    clock: ClockedEngine,
    groups: Sequence[RolloutGroup],
    batches: int,
    *,
    checkpoint_every: int | None = None,
) -> list[dict[str, float]]:
    """Train the same groups again and again, in at least two batches; None saves no checkpoint.

    Returns:
        For each batch but the first the seconds of the `gap` before it, and of the `step`: the gap
        and the computing after it.
    """
    with local_ray(cores=2), tempfile.TemporaryDirectory() as folder:
        train = _train(rank, clock, groups, batches, checkpoint_every, Path(folder))
        computed = asyncio.run(train)
    return [
        {"gap": first - last, "step": end - last} for (_, last), (first, end) in pairwise(computed)
    ]


async def _train(
    rank: Rank,
    clock: ClockedEngine,
    groups: Sequence[RolloutGroup],
    batches: int,
    every: int | None,
    folder: Path,
) -> list[tuple[float, float]]:
    broker = create_broker(
        folder,
        config=QueuesConfig(max_staleness=batches, window=batches * len(groups)),
        spec=RunSpec(
            groups_per_batch=len(groups), group_size=len(groups[0].rollouts), steps=batches
        ),
    )
    await _fill(broker, groups, batches)
    broadcaster = create_broadcaster(1.0, 1)
    publisher = make_publisher(WeightSyncConfig(), broadcaster)
    thread = ThreadPoolExecutor(1)

    async def call(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        task = partial(work, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(thread, task)

    rank.spec = replace(rank.spec, checkpoints=str(folder / "checkpoints"))
    saves = every is not None
    rank_zero = ClockedRankZero(clock, rank, call, publisher, broadcaster, saves=saves)
    learner = Learner(rank_zero, broker, steps=batches, checkpoint_every=every or batches + 1)
    try:
        await learner.run()
    finally:
        thread.shutdown()
        publisher.close()
        await broker.close()
    return rank_zero.computed


async def _fill(broker: BrokerClient, groups: Sequence[RolloutGroup], batches: int) -> None:
    """Put the groups of all batches into the broker."""
    wanted = batches * len(groups)
    prompts = [Prompt(prompt_id=f"bench/0/{number}", text="") for number in range(wanted)]
    await broker.serving(ENGINE, 0)
    await broker.issue(prompts, cursor="", last=True)
    leases = await broker.lease(ENGINE, wanted * len(groups[0].rollouts), 30.0)
    if len(leases) < wanted:
        raise RunFailed(f"the broker leased {len(leases)} of {wanted} groups")
    for lease, group in zip(leases, cycle(groups), strict=False):
        group = replace(group, group_id=lease.group_id, attempt=lease.attempt)
        group = replace(group, prompt_id=lease.prompt.prompt_id)
        await broker.put(ENGINE, encode(group))
