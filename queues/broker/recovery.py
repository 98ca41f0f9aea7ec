"""Recovery of a broker's state from the ledger, however the last broker ended.

Accepted groups are ready, a taken batch is taken, evaluations continue. Leases are void, since
their holders got them from a broker that is gone: those groups are at the front of the queue, as
are prompts that were issued anew, and their next lease has a higher attempt, so late results of the
old leases are refused. Failed attempts are forgotten: nothing waits because of one, and every group
has its full number of attempts.
"""

import json
import time

from queues.errors import AccountingError, InputError
from queues.policy.admission import feasible
from queues.readers.accounting import account
from queues.records import BatchRecord
from queues.state.broker_state import BATCHES_KEPT, BrokerState
from queues.state.evaluations import EvaluationRun
from queues.state.groups import UNREACHABLE, Group, Groups, State
from queues.storage.ledger import DROPPED_SINCE_TAKE, LET_THROUGH, Ledger, load_prompt
from queues.storage.snapshot import Row, Snapshot


def recover(ledger: Ledger, state: BrokerState) -> None:
    """Fill a new state from the ledger.

    Raises:
        InputError: The run was begun with another groups_per_batch or group_size.
        AccountingError: The groups of the ledger do not add up.
    """
    _check_sizes(ledger, state)
    snapshot = ledger.load()
    state.groups = Groups(finished=snapshot.finished)
    state.cursor = snapshot.meta.get("cursor")
    state.ended = "ended" in snapshot.meta
    state.next_number = snapshot.next_number
    state.accepted, state.late = snapshot.accepted, snapshot.late
    acked = [row for row in snapshot.batches if row["acked_at"] is not None]
    state.version = len(acked)
    for row in acked[-BATCHES_KEPT:]:
        state.add_batch(
            BatchRecord(
                version=row["version"],
                acked_at=row["acked_at"],
                statistics=json.loads(row["statistics"]),
            )
        )
    state.evaluations.update(_evaluations(snapshot))
    for run in state.evaluations.values():
        if not run.finished:
            state.prompts.open_evaluation(run.name, run.min_version)
    if state.tie_filter is not None:
        state.tie_filter.dropped = snapshot.counters.get(DROPPED_SINCE_TAKE, 0)
        state.tie_filter.let_through = snapshot.counters.get(LET_THROUGH, 0)
    state.retirement.names.update(snapshot.retired)
    for prompt_id in snapshot.failed_prompts:
        state.retirement.add_failed(prompt_id)
    _add_groups(snapshot, state)
    for group_id, oldest_version in ledger.partials.oldest().items():
        if (group := state.groups.in_flight.get(group_id)) is not None:
            group.saved = oldest_version
    ledger.begin()
    for group in state.fail_unreachable():  # a run that is continued may have fewer steps
        ledger.fail(group.group_id, UNREACHABLE, f"training ended at version {state.version}")
    last = state.version if state.taken else state.version - 1
    ledger.reissue(state.pass_over(), last)  # not empty if `on_overdue` was another before
    ledger.commit()
    _check_accounts(ledger, state)
    _check_due(state)


def _check_sizes(ledger: Ledger, state: BrokerState) -> None:
    sizes = {"groups_per_batch": state.bounds.groups_per_batch, "group_size": state.group_size}
    for name, value in sizes.items():
        begun_with = ledger.remember(name, str(value))
        if begun_with != str(value):
            raise InputError(f"{name} = {value}, but this run was begun with {begun_with}")


def _check_accounts(ledger: Ledger, state: BrokerState) -> None:
    counts, memory = ledger.counts(), dict(state.groups.counts)
    if not account(counts, memory).balanced:
        raise AccountingError(
            f"{ledger.directory}: the groups do not add up: in the ledger {counts}, in memory"
            f" {memory}"
        )


def _check_due(state: BrokerState) -> None:
    bounds, due = state.bounds, state.groups.due
    size = bounds.groups_per_batch
    if bounds.on_overdue == "wait" and not feasible(
        due, version=state.version, groups_per_batch=size
    ):
        raise InputError(
            'on_overdue = "wait", but this run went on with another policy before and has more'
            f" results than can be trained in time, by deadline {dict(sorted(due.items()))} at"
            f' version {state.version}; go on with that policy, or with "drop"'
        )


def _add_groups(snapshot: Snapshot, state: BrokerState) -> None:
    redelivered, issued_anew = [], set(snapshot.issued_anew)
    to_monotonic = time.monotonic() - time.time()
    for row in snapshot.groups:
        group = Group(
            number=row["number"],
            group_id=row["group_id"],
            prompt=load_prompt(row["prompt"]),
            evaluation=row["evaluation"],
            state=State(row["state"]),
            attempt=row["attempt"],
            engine_id=row["engine_id"],
            start_version=row["start_version"],
        )
        if group.state is State.READY:
            group.due, group.ready_at = row["deadline_version"], row["accepted_at"] + to_monotonic
            state.results.add(group)
        elif group.state is State.TAKEN:
            group.due = row["batch"]
            group.overdue = row["deadline_version"] < row["batch"]
            state.taken.append(group)
        elif group.attempt or group.prompt.prompt_id in issued_anew:
            redelivered.append(group)
        else:
            state.prompts.append(group)
        state.groups.add(group)
    for group in reversed(redelivered):
        state.prompts.redeliver(group)


def _evaluations(snapshot: Snapshot) -> dict[str, EvaluationRun]:
    runs = {row["name"]: _evaluation(row) for row in snapshot.evaluations}
    for name, prompt_id, reward in snapshot.best:
        runs[name].best[prompt_id] = reward
    for name, prompt_id in snapshot.incomplete:
        runs[name].incomplete.add(prompt_id)
    return runs


def _evaluation(row: Row) -> EvaluationRun:
    return EvaluationRun(
        **{
            **dict(row),
            "rewards": row["rewards"] or 0.0,
            "tokens": row["tokens"] or 0,
        }
    )
