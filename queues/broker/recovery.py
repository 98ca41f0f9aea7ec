"""A book from a ledger: how a broker goes on after its predecessor, however that ended.

Accepted groups are ready, a taken batch is taken, evaluations go on. Leases are void, since their
holders hold them from a broker that is gone: those groups stand at the front of the line, as do
prompts that were issued anew, and their next lease has a higher attempt, so late results of the old
ones are refused. Failed attempts are forgotten: nobody waits because of one, and budgets are whole.
"""

import json
import time

from queues.errors import AccountingError, InputError
from queues.policy.admission import feasible
from queues.readers.accounting import account
from queues.records import BatchRecord
from queues.state.broker_state import BATCHES_KEPT, UNREACHABLE, BrokerState
from queues.state.evaluations import EvaluationRun
from queues.state.groups import Group, Groups, State
from queues.storage.ledger import DROPPED_SINCE_TAKE, LET_THROUGH, Ledger, load_prompt
from queues.storage.snapshot import Row, Snapshot


def recover(ledger: Ledger, book: BrokerState) -> None:
    """Fill a new book with what the ledger says.

    Raises:
        InputError: The run was begun with another groups_per_batch or group_size.
        AccountingError: The groups of the ledger do not add up.
    """
    _check_shape(ledger, book)
    snapshot = ledger.load()
    book.groups = Groups(finished=snapshot.finished)
    book.cursor = snapshot.meta.get("cursor")
    book.ended = "ended" in snapshot.meta
    book.next_number = snapshot.next_number
    book.accepted, book.late = snapshot.accepted, snapshot.late
    acked = [row for row in snapshot.batches if row["acked_at"] is not None]
    book.version = len(acked)
    for row in acked[-BATCHES_KEPT:]:
        book.add_batch(_batch(row))
    book.evaluations.update(_evaluations(snapshot))
    for run in book.evaluations.values():
        if not run.finished:
            book.prompts.open_evaluation(run.name, run.min_version)
    if book.tie_filter is not None:
        book.tie_filter.dropped = snapshot.counters.get(DROPPED_SINCE_TAKE, 0)
        book.tie_filter.let_through = snapshot.counters.get(LET_THROUGH, 0)
    book.retirement.names.update(snapshot.retired)
    for prompt_id in snapshot.poisonous:
        book.retirement.poison(prompt_id)
    _place_groups(snapshot, book)
    for group_id, oldest_version in ledger.partials.oldest().items():
        if (group := book.groups.in_flight.get(group_id)) is not None:
            group.saved = oldest_version
    ledger.begin()
    for group in book.settle():  # a run that is gone on with may have fewer steps
        ledger.fail(group.group_id, UNREACHABLE, f"training ended at version {book.version}")
    last = book.version - (not book.taken)
    ledger.reissue(book.pass_over(), last)  # there are some where `on_overdue` was another before
    ledger.commit()
    _check_accounts(ledger, book)
    _check_due(book)


def _check_shape(ledger: Ledger, book: BrokerState) -> None:
    shape = {"groups_per_batch": book.bounds.groups_per_batch, "group_size": book.group_size}
    for name, value in shape.items():
        begun_with = ledger.remember(name, str(value))
        if begun_with != str(value):
            raise InputError(f"{name} = {value}, but this run was begun with {begun_with}")


def _check_accounts(ledger: Ledger, book: BrokerState) -> None:
    counts, memory = ledger.counts(), dict(book.groups.counts)
    if not account(counts, memory).balanced:
        raise AccountingError(
            f"{ledger.directory}: the groups do not add up: in the ledger {counts}, in memory"
            f" {memory}"
        )


def _check_due(book: BrokerState) -> None:
    bounds, due = book.bounds, book.groups.due
    size = bounds.groups_per_batch
    if bounds.on_overdue == "wait" and not feasible(
        due, version=book.version, groups_per_batch=size
    ):
        raise InputError(
            'on_overdue = "wait", but this run went on with another policy before and has more'
            f" results than can be trained in time, by deadline {dict(sorted(due.items()))} at"
            f' version {book.version}; go on with that policy, or with "drop"'
        )


def _place_groups(snapshot: Snapshot, book: BrokerState) -> None:
    redelivered, anew = [], set(snapshot.issued_anew)
    age = time.monotonic() - time.time()  # from epoch to monotonic seconds
    for row in snapshot.groups:
        group = _group(row)
        if group.state is State.READY:
            group.due, group.ready_at = row["deadline_version"], row["accepted_at"] + age
            book.results.add(group)
        elif group.state is State.TAKEN:
            group.due = row["batch"]
            group.overdue = row["deadline_version"] < row["batch"]
            book.taken.append(group)
        elif group.attempt or group.prompt.prompt_id in anew:
            redelivered.append(group)
        else:
            book.prompts.append(group)
        book.groups.add(group)
    for group in reversed(redelivered):
        book.prompts.redeliver(group)


def _group(row: Row) -> Group:
    return Group(
        number=row["number"],
        group_id=row["group_id"],
        prompt=load_prompt(row["prompt"]),
        evaluation=row["evaluation"],
        state=State(row["state"]),
        attempt=row["attempt"],
        engine_id=row["engine_id"],
        start_version=row["start_version"],
    )


def _batch(row: Row) -> BatchRecord:
    return BatchRecord(
        version=row["version"],
        acked_at=row["acked_at"],
        statistics=json.loads(row["statistics"]),
    )


def _evaluations(snapshot: Snapshot) -> dict[str, EvaluationRun]:
    runs = {row["name"]: _evaluation(row) for row in snapshot.evaluations}
    for name, prompt_id, reward in snapshot.best:
        runs[name].best[prompt_id] = reward
    for name, prompt_id in snapshot.incomplete:
        runs[name].incomplete.add(prompt_id)
    return runs


def _evaluation(row: Row) -> EvaluationRun:
    return EvaluationRun(
        name=row["name"],
        count=row["count"],
        temperature=row["temperature"],
        min_version=row["min_version"],
        scored=row["scored"],
        failed=row["failed"],
        rewards=row["rewards"] or 0.0,
        tokens=row["tokens"] or 0,
        lowest_version=row["lowest_version"],
        highest_version=row["highest_version"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
    )
