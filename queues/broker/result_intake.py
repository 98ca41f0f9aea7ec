"""Results come in: many in a message, summarised together, recorded in one commit."""

import logging
import time
from collections.abc import Callable, Sequence

from queues.broker.commit_pipeline import Commits
from queues.broker.long_polls import LongPolls
from queues.broker.payload_batching import Arrivals
from queues.errors import ProtocolError, QueuesError, SchemaError
from queues.records import Payload, PutStatus, Summary
from queues.state.broker_state import BrokerState
from queues.state.groups import Group, State
from queues.storage.journal import Location
from queues.storage.ledger import Ledger

log = logging.getLogger(__name__)
Change = Callable[[], PutStatus | QueuesError]


class Puts:
    """Accepts what was leased, once.

    Args:
        book: Decides.
        ledger: Records.
        commits: Makes it durable.
        arrivals: Looks at payloads.
    """

    def __init__(
        self, book: BrokerState, ledger: Ledger, commits: Commits, arrivals: Arrivals
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._commits = commits
        self._arrivals = arrivals

    async def put_many(self, puts: Sequence[tuple[str, Payload]]) -> list[PutStatus | QueuesError]:
        """The answer to each (engine id, payload): as `Broker.put` returns or raises it.

        They are decided in their order, once their payloads are in the journal, and their rows are
        durable together. What is refused after all leaves a frame that nobody refers to.
        """
        results = await self._arrivals.summarize([payload for _, payload in puts])
        self._commits.check_open()
        places = await self._keep(puts, results)
        self._commits.check_open()
        changes: list[Change] = []
        wakes: dict[LongPolls, None] = {}
        for number, ((engine_id, _), result) in enumerate(zip(puts, results, strict=True)):
            changes.append(
                _answer(result)
                if isinstance(result, SchemaError)
                else self._put(engine_id, result, places.get(number), wakes)
            )
        if all(isinstance(result, SchemaError) for result in results):
            return [change() for change in changes]
        return await self._commits.durable(lambda: [change() for change in changes], *wakes)

    async def _keep(
        self, puts: Sequence[tuple[str, Payload]], results: Sequence[Summary | SchemaError]
    ) -> dict[int, Location]:
        """Journal what may be accepted; where each of it lies, by its number."""
        kept = {}
        for number, ((engine_id, payload), result) in enumerate(zip(puts, results, strict=True)):
            group = None if isinstance(result, SchemaError) else self._leased(engine_id, result)
            if group is not None and group.evaluation is None:
                kept[number] = payload
        if not kept:
            return {}
        return dict(zip(kept, await self._commits.keep([*kept.values()]), strict=True))

    def _leased(self, engine_id: str, result: Summary) -> Group | None:
        """The group that a result is of, where the engine still holds its lease."""
        group = self._book.groups.in_flight.get(result.group_id)
        return group if group and group.is_leased_to(engine_id, result.attempt) else None

    def _put(
        self,
        engine_id: str,
        result: Summary,
        place: Location | None,
        wakes: dict[LongPolls, None],
    ) -> Change:
        """Decide about one group; what is to be recorded of it."""
        book, commits = self._book, self._commits
        group = self._leased(engine_id, result)
        if group is None or (place is None and group.evaluation is None):
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
            self._ledger.accept(result, place, accepted)
            return PutStatus.ACCEPTED

        return record

    def _refuse(self, group_id: str) -> PutStatus | QueuesError:
        has_result = self._ledger.refuse(group_id)
        if has_result is None:
            return ProtocolError(f"put: group {group_id!r} was never issued")
        answer = PutStatus.DUPLICATE if has_result else PutStatus.FENCED
        self._book.refused[answer] += 1
        return answer


def _answer(error: SchemaError) -> Change:
    return lambda: error
