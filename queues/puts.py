"""Results come in: many in a message, summarised in one thread, durable in one commit."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from queues import schema
from queues.book import Book
from queues.commits import Commits
from queues.errors import ProtocolError, QueuesError, SchemaError
from queues.groups import State
from queues.journal import Journal
from queues.ledger import Ledger
from queues.long_polls import LongPolls
from queues.records import Payload, PutStatus, Summary

log = logging.getLogger(__name__)
Change = Callable[[], PutStatus | QueuesError]


class Puts:
    """Accepts what was leased, once.

    Args:
        book: Decides.
        ledger: Records.
        journal: Keeps payloads.
        commits: Makes it durable.
    """

    def __init__(self, book: Book, ledger: Ledger, journal: Journal, commits: Commits) -> None:
        self._book = book
        self._ledger = ledger
        self._journal = journal
        self._commits = commits

    async def put_many(self, puts: Sequence[tuple[str, Payload]]) -> list[PutStatus | QueuesError]:
        """The answer to each (engine id, payload): as `Broker.put` returns or raises it.

        They are decided in their order, and durable together.
        """
        results = await asyncio.to_thread(schema.summarize_many, [payload for _, payload in puts])
        self._commits.check_open()
        changes: list[Change] = []
        wakes: dict[LongPolls, None] = {}
        for (engine_id, payload), result in zip(puts, results, strict=True):
            changes.append(
                _answer(result)
                if isinstance(result, SchemaError)
                else self._put(engine_id, payload, result, wakes)
            )
        if all(isinstance(result, SchemaError) for result in results):
            return [change() for change in changes]
        return await self._commits.durable(lambda: [change() for change in changes], *wakes)

    def _put(
        self, engine_id: str, payload: Payload, result: Summary, wakes: dict[LongPolls, None]
    ) -> Change:
        """Decide about one group; what is to be recorded of it."""
        book, commits = self._book, self._commits
        group = book.groups.in_flight.get(result.group_id)
        if group is None or not group.is_leased_to(engine_id, result.attempt):
            book.refused += 1
            return lambda: self._refuse(result.group_id)
        try:
            accepted = book.accept(group, result, now=time.monotonic())
        except SchemaError as error:
            return _answer(error)
        tie_filter = book.tie_filter
        if accepted.let_through and tie_filter is not None and tie_filter.passed == 1:
            log.warning(
                "batch %d: %d groups without a signal were filtered, the limit"
                " (queues.max_filtered_batches); more of them are trained",
                book.version + bool(book.taken), tie_filter.dropped,
            )  # fmt: skip
        wakes[commits.progress] = None
        if accepted.state is not State.READY:
            wakes[commits.work] = None
        if accepted.state is State.DROPPED:
            wakes[commits.line] = None

        def record() -> PutStatus:
            location = self._journal.append(payload) if group.evaluation is None else None
            self._ledger.accept(result, location, accepted)
            return PutStatus.ACCEPTED

        return record

    def _refuse(self, group_id: str) -> PutStatus | QueuesError:
        has_result = self._ledger.refuse(group_id)
        if has_result is None:
            return ProtocolError(f"put: group {group_id!r} was never issued")
        return PutStatus.DUPLICATE if has_result else PutStatus.FENCED


def _answer(error: SchemaError) -> Change:
    return lambda: error
