"""The broker's side of `BatchQueue`: batches go out, acknowledgements and checkpoints come in."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from headway import clock
from headway.errors import InputError
from queues.broker.commit_pipeline import CommitPipeline
from queues.broker.retention import Retention
from queues.protocols import BatchQueue
from queues.readers.accounting import require_balanced
from queues.records import Batch, BatchRecord
from queues.state.broker_state import BrokerState
from queues.state.groups import FILTERED, OVERDUE
from queues.storage.journal import Location, read_group
from queues.storage.ledger_schema import EPOCH

log = logging.getLogger(__name__)
CHECKSUM = "weights_checksum"
"""Key in a batch's statistics: checksum of the weights after it."""


class BrokerBatchQueue(BatchQueue):
    """Hands out batches and records what became of them.

    A learner that is made again has a higher `epoch`; calls of those before it are refused with a
    ProtocolError.
    """

    def __init__(self, commits: CommitPipeline, retention: Retention) -> None:
        self.commits = commits
        self.retention = retention

    async def begin_learner(self, epoch: int) -> None:
        """Refuse learners of lower epochs from now on; what they submitted before is durable."""
        self.commits.state.begin_learner(epoch)
        await self.commits.submit(lambda: self.commits.ledger.note(EPOCH, f"{epoch}"))

    async def take(self, version: int, timeout: float, *, epoch: int = 0) -> Batch | None:
        commits, state = self.commits, self.commits.state

        def decide() -> asyncio.Future[list[Location]] | None:
            state.check_epoch(epoch)
            state.learner = epoch, version
            is_taken = version == state.version and state.taken
            if 0 <= version < state.version or is_taken:
                return commits.submit(partial(commits.ledger.locations, version))
            group_ids = state.take(version)
            if group_ids is None:
                return None
            reissues = state.pass_over()
            if reissues:
                log.info(
                    "batch %d: %d groups are overdue and dropped: %s", version, len(reissues),
                    ", ".join(dropped.group_id for dropped, _ in reissues),
                )  # fmt: skip

            def record() -> list[Location]:
                commits.ledger.reissue(reissues, version)
                return commits.ledger.take(version, group_ids)

            return commits.submit(record)

        recorded = await commits.progress_polls.until(decide, timeout)
        if recorded is None:
            return None
        if state.bounds.on_overdue != "wait":  # overdue groups have freed places
            commits.lease_polls.wake()
            commits.prompt_polls.wake()
        directory, locations = commits.journal.directory, await recorded
        payloads = await asyncio.to_thread(
            lambda: [read_group(directory, location) for location in locations]
        )
        return Batch(version=version, payloads=payloads)

    async def ack(self, version: int, statistics: Mapping[str, Any], *, epoch: int = 0) -> bool:
        commits, state = self.commits, self.commits.state
        commits.check_open()
        state.check_epoch(epoch)
        if version < state.version:
            await self._compare(version, statistics)
            return False
        try:
            text = json.dumps({**statistics, **broker_statistics(state, statistics)})
        except (TypeError, ValueError) as error:
            raise InputError(f"statistics of batch {version} are not JSON: {error}") from error
        record = BatchRecord(version=version, acked_at=clock.now(), statistics=json.loads(text))
        state.ack(record, now=time.monotonic())
        commits.lease_polls.wake_at(state.patience_ends)
        memory = dict(state.groups.counts)
        counts = await commits.durable(
            partial(commits.ledger.ack, version, text), *commits.all_polls
        )
        require_balanced(counts, memory, where=f"after batch {version}")
        return True

    async def commit_checkpoint(self, version: int, path: str, *, epoch: int = 0) -> None:
        self.commits.check_open()
        self.commits.state.check_epoch(epoch)
        await self.commits.durable(partial(self.commits.ledger.commit_checkpoint, version, path))
        await self.retention.apply()

    async def _compare(self, version: int, statistics: Mapping[str, Any]) -> None:
        """Compare a batch that was trained again with its record.

        If the weights differ, their checksum is recorded: a checkpoint of them must have it.
        """
        ledger = self.commits.ledger
        recorded = json.loads(await self.commits.submit(partial(ledger.statistics, version)))
        before, now = recorded.get(CHECKSUM), statistics.get(CHECKSUM)
        if before != now:
            text = json.dumps({**recorded, CHECKSUM: now})
            await self.commits.durable(partial(ledger.replace_statistics, version, text))
            self.commits.state.diverged += 1
            log.warning(
                "batch %d, trained again, gave other weights than before: checksum %s, was %s;"
                " from here on the run is another one than that which was rolled back",
                version, now, before,
            )  # fmt: skip


def broker_statistics(state: BrokerState, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the broker adds to the learner's statistics of the taken batch."""
    added: dict[str, Any] = {}
    if state.tie_filter.limit is not None:
        added["groups_filtered"] = state.groups.dropped(FILTERED)
        added["groups_let_through"] = state.tie_filter.let_through
    if state.retirement.cap is not None:
        added["prompts_retired"] = len(state.retirement.names)
    if state.curriculum is not None:
        added["curriculum_weight"] = state.curriculum.mean_weight
    if state.bounds.on_overdue != "wait":
        added["groups_overdue"] = state.late + state.groups.dropped(OVERDUE)
    if state.controller is not None:
        added |= state.use_of_window
        added |= state.controller.after({**statistics, **added})
    return added
