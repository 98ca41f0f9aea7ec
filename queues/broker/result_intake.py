"""Acceptance of results: many per message, summarised together, recorded in one commit."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from headway.errors import HeadwayError
from queues import schema
from queues.broker.commit_pipeline import CommitPipeline
from queues.broker.long_polls import LongPolls
from queues.broker.retention import Retention
from queues.errors import ProtocolError, SchemaError
from queues.records import Payload, PutStatus, Summary
from queues.state.groups import Group, State
from queues.storage.journal import Location

log = logging.getLogger(__name__)
BATCH_BYTES = 2**20
Put = tuple[str, Payload]
"""Engine id and payload."""
Results = list[Summary | SchemaError]
Change = Callable[[], PutStatus | HeadwayError]


class PayloadBatching:
    """Summarises payloads that arrive in different messages together, in the event loop.

    The cost of a validation is mostly per call and not per row, and higher in a thread beside a
    busy event loop than in the loop itself. Large payloads get a thread each; `batch_bytes` are
    validated before the loop goes on with other work.
    """

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        self._batch_bytes = batch_bytes
        self._arrivals: list[tuple[Sequence[Payload], asyncio.Future[Results]]] = []

    async def summarize(self, payloads: Sequence[Payload]) -> Results:
        """Return what `schema.summarize_many` returns."""
        if max(map(len, payloads), default=0) > schema.SMALL_BYTES:
            return await asyncio.to_thread(schema.summarize_many, payloads)
        loop = asyncio.get_running_loop()
        results: asyncio.Future[Results] = loop.create_future()
        self._arrivals.append((payloads, results))
        if len(self._arrivals) == 1:
            loop.call_soon(self._summarize_batch)
        return await results

    def _summarize_batch(self) -> None:
        """Answer the earliest arrivals, and schedule the next batch."""
        count, size = 0, 0
        while count < len(self._arrivals) and (not count or size < self._batch_bytes):
            size += sum(map(len, self._arrivals[count][0]))
            count += 1
        batch, self._arrivals = self._arrivals[:count], self._arrivals[count:]
        if self._arrivals:
            asyncio.get_running_loop().call_soon(self._summarize_batch)
        try:
            results = schema.summarize_many([x for payloads, _ in batch for x in payloads])
        except Exception as error:  # noqa: BLE001  (raised in every caller)
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        first = 0
        for payloads, future in batch:
            if not future.done():
                future.set_result(results[first : first + len(payloads)])
            first += len(payloads)


class ResultIntake:
    """Accepts one result of every leased group."""

    def __init__(
        self, commits: CommitPipeline, payloads: PayloadBatching, retention: Retention
    ) -> None:
        self._commits = commits
        self._payloads = payloads
        self._retention = retention

    async def put_many(self, puts: Sequence[Put]) -> list[PutStatus | HeadwayError]:
        """Return for each put what `WorkQueue.put` returns or raises.

        Puts are decided in their order, once their payloads are in the journal, and their rows are
        durable together. A refused put may leave a frame that nothing refers to.
        """
        with self._retention.put():
            results = await self._payloads.summarize([payload for _, payload in puts])
            self._commits.check_open()
            locations = await self._journal(puts, results)
            self._commits.check_open()
            wakes: dict[LongPolls, None] = {}
            changes = [
                self._decide(engine_id, result, locations.get(index), wakes)
                for index, ((engine_id, _), result) in enumerate(zip(puts, results, strict=True))
            ]
            if all(isinstance(result, SchemaError) for result in results):
                return [change() for change in changes]
            made = self._commits.durable(lambda: [change() for change in changes], *wakes)
            answers = await made  # `changes` are called again if the disk was full
            self._commits.state.answers.update(x for x in answers if isinstance(x, PutStatus))
            return answers

    async def _journal(
        self, puts: Sequence[Put], results: Sequence[Summary | SchemaError]
    ) -> dict[int, Location]:
        """Append payloads that may be accepted to the journal; return locations by index."""
        kept = {}
        for index, ((engine_id, payload), result) in enumerate(zip(puts, results, strict=True)):
            group = None if isinstance(result, SchemaError) else self._leased(engine_id, result)
            if group is not None and group.evaluation is None:
                kept[index] = payload
        if not kept:
            return {}
        return dict(zip(kept, await self._commits.keep([*kept.values()]), strict=True))

    def _leased(self, engine_id: str, result: Summary) -> Group | None:
        groups = self._commits.state.groups
        return groups.leased_to(engine_id, result.group_id, result.attempt)

    def _decide(
        self,
        engine_id: str,
        result: Summary | SchemaError,
        location: Location | None,
        wakes: dict[LongPolls, None],
    ) -> Change:
        """Decide about one result; return the change of the ledger, and add whom it wakes."""
        if isinstance(result, SchemaError):
            return _returning(result)
        commits, state = self._commits, self._commits.state
        group = self._leased(engine_id, result)
        if group is None or (location is None and group.evaluation is None):
            return lambda: self._refuse(result.group_id)
        try:
            accepted = state.accept(group, result, now=time.monotonic())
        except SchemaError as error:
            return _returning(error)
        if accepted.let_through and state.tie_filter.passed == 1:
            log.warning(
                "batch %d: %d groups without a signal were filtered, the limit"
                " (queues.max_filtered_batches); more of them are trained",
                state.version + (1 if state.taken else 0), state.tie_filter.dropped,
            )  # fmt: skip
        wakes[commits.progress_polls] = None
        if accepted.state is not State.READY:
            wakes[commits.lease_polls] = None
        if accepted.state is State.DROPPED:
            wakes[commits.prompt_polls] = None

        def record() -> PutStatus:
            commits.ledger.accept(result, location, accepted)
            return PutStatus.ACCEPTED

        return record

    def _refuse(self, group_id: str) -> PutStatus | HeadwayError:
        has_result = self._commits.ledger.refuse(group_id)
        if has_result is None:
            return ProtocolError(f"put: group {group_id!r} was never issued")
        return PutStatus.DUPLICATE if has_result else PutStatus.FENCED


def _returning(error: SchemaError) -> Change:
    return lambda: error
