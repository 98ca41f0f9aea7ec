"""Recovery of a broker's state from the ledger, however the last broker ended.

Accepted groups are ready, a taken batch is taken, evaluations continue. Leases are void, and their
groups are at the front of the queue, as are prompts that were issued anew; failed attempts are
forgotten. Only a broker that is made again under the name of the last one goes on with its leases,
which their holders have a whole term to claim, with the engines' versions and the learner's epoch.
"""

import json
import time

from headway import clock
from headway.errors import InputError
from queues.policy.admission import feasible
from queues.readers.accounting import require_balanced
from queues.records import BatchRecord, Purpose
from queues.state.broker_state import BATCHES_KEPT, BrokerState
from queues.state.groups import FINAL, OVERDUE, UNREACHABLE, EvaluationRun, Group, Groups, State
from queues.storage.ledger import DROPPED_SINCE_TAKE, LET_THROUGH, Ledger, load_prompt
from queues.storage.ledger_schema import EPOCH, ISSUE_TOKEN, OWNER, SERVES

_OF_ANY = f"purpose IN ('{Purpose.TRAIN}', '{Purpose.EVALUATE}')"
"""With this condition SQLite finds the groups of some states by an index, among millions."""


def recover(ledger: Ledger, state: BrokerState, *, owner: str | None = None) -> bool:
    """Fill a new state from the ledger, for a broker that is made under the name `owner`.

    Returns whether the last broker had the same name, so that its leases go on. Raises InputError
    if the run was begun with other sizes.
    """
    _check_sizes(ledger, state)
    meta = dict(ledger.execute("SELECT key, value FROM meta").fetchall())
    goes_on = owner is not None and meta.get(OWNER) == owner
    if not goes_on:
        ledger.execute(f"UPDATE groups SET state = 'queued' WHERE {_OF_ANY} AND state = 'leased'")
        for pattern in (f"{SERVES}*", EPOCH):
            ledger.forget(pattern)
    else:
        state.learner = int(meta.get(EPOCH, 0)), -1
        served = {key: int(value) for key, value in meta.items() if key.startswith(SERVES)}
        state.engines = {key.removeprefix(SERVES): version for key, version in served.items()}
    state.cursor, state.ended = meta.get("cursor"), "ended" in meta
    if ISSUE_TOKEN in meta:
        state.issue_tokens.append(meta[ISSUE_TOKEN])
    _read_totals(ledger, state)
    _read_evaluations(ledger, state)
    _read_selection(ledger, state)
    _read_groups(ledger, state)
    ledger.begin()
    for group in state.fail_unreachable():  # a run that is continued may have fewer steps
        ledger.fail(group.group_id, UNREACHABLE, f"training ended at version {state.version}")
    last = state.version if state.taken else state.version - 1
    ledger.reissue(state.pass_over(), last)  # not empty if `on_overdue` was another before
    ledger.commit()
    require_balanced(ledger.counts(), dict(state.groups.counts), where=str(ledger.directory))
    _check_due(state)
    return goes_on


def _check_sizes(ledger: Ledger, state: BrokerState) -> None:
    sizes = {"groups_per_batch": state.bounds.groups_per_batch, "group_size": state.spec.group_size}
    for name, value in sizes.items():
        begun_with = ledger.remember(name, str(value))
        if begun_with != str(value):
            raise InputError(f"{name} = {value}, but this run was begun with {begun_with}")


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


def _read_totals(ledger: Ledger, state: BrokerState) -> None:
    states = ledger.counts().states
    state.groups = Groups(finished={key: n for key, n in states.items() if key[1] in FINAL})
    state.accepted, late, late_taken, state.next_number, state.version = ledger.execute(
        "SELECT (SELECT count(*) FROM results),"
        " (SELECT count(*) FROM groups WHERE deadline_version < trained_version),"
        " (SELECT count(*) FROM groups JOIN batch_groups USING (group_id)"
        f"  WHERE {_OF_ANY} AND state = 'taken' AND deadline_version < version),"
        " (SELECT coalesce(max(number), 0) + 1 FROM groups),"
        " (SELECT count(*) FROM batches WHERE acked_at IS NOT NULL)"
    ).fetchone()
    state.late = late + late_taken
    acked = ledger.execute(
        "SELECT version, acked_at, statistics FROM batches"
        " WHERE acked_at IS NOT NULL ORDER BY version DESC LIMIT ?",
        (BATCHES_KEPT,),
    ).fetchall()
    for version, acked_at, text in reversed(acked):
        record = BatchRecord(version=version, acked_at=acked_at, statistics=json.loads(text))
        state.add_batch(record)


def _read_evaluations(ledger: Ledger, state: BrokerState) -> None:
    for name, count, temperature, min_version, ended in ledger.execute(
        "SELECT name, evaluations.count, temperature, min_version,"
        " sum(state IN ('scored', 'failed'))"
        " FROM evaluations JOIN groups ON evaluation = name"
        f" WHERE purpose = '{Purpose.EVALUATE}' GROUP BY name ORDER BY min(number)"
    ):
        state.evaluations[name] = EvaluationRun(
            name=name, count=count, temperature=temperature, min_version=min_version, ended=ended
        )


def _read_selection(ledger: Ledger, state: BrokerState) -> None:
    """Fill the filter of tied groups, pass rates, and the prompts that are not issued again."""
    counters = dict(ledger.execute("SELECT name, value FROM counters").fetchall())
    state.tie_filter.dropped = counters.get(DROPPED_SINCE_TAKE, 0)
    state.tie_filter.let_through = counters.get(LET_THROUGH, 0)
    state.retirement.names.update(name for (name,) in ledger.execute("SELECT prompt FROM retired"))
    for prompt_id in _train_prompts(ledger, "state = 'failed'"):
        state.retirement.add_failed(prompt_id)
    if state.curriculum is not None:
        for text, *result in ledger.execute(
            "SELECT prompt, number, passes, rollouts FROM groups JOIN results USING (group_id)"
            " WHERE passes IS NOT NULL ORDER BY number"
        ):
            measured = dict(zip(("number", "passes", "rollouts"), result, strict=True))
            state.curriculum.measure(load_prompt(text), **measured)


def _read_groups(ledger: Ledger, state: BrokerState) -> None:
    """Fill the groups that are not in a final state, and put them into their queues."""
    issued_anew = set(_train_prompts(ledger, f"state = 'dropped' AND reason = '{OVERDUE}'"))
    oldest_saved, oldest_noted = ledger.oldest("partials"), ledger.oldest("notes")
    now = time.monotonic()
    to_monotonic = now - clock.now()
    live = ", ".join(f"'{x}'" for x in State if x not in FINAL)
    redelivered = []
    for row in ledger.execute(
        "SELECT groups.*, accepted_at, version AS batch FROM groups"
        " LEFT JOIN results USING (group_id) LEFT JOIN batch_groups USING (group_id)"
        f" WHERE {_OF_ANY} AND state IN ({live}) ORDER BY batch, position, number"
    ):
        group = Group(
            number=row["number"],
            group_id=row["group_id"],
            prompt=load_prompt(row["prompt"]),
            evaluation=row["evaluation"],
            state=State(row["state"]),
            attempt=row["attempt"],
            engine_id=row["engine_id"],
            start_version=row["start_version"],
            saved=oldest_saved.get(row["group_id"]),
            noted=oldest_noted.get(row["group_id"]),
        )
        if group.state is State.READY:
            # The stamp is of an earlier session, whose clock may have been ahead.
            group.ready_at = min(now, row["accepted_at"] + to_monotonic)
            group.due, group.ready_version = row["deadline_version"], state.version
            state.add_result(group)
        elif group.state is State.LEASED:
            group.due = row["deadline_version"]
            group.expires = now + state.config.lease_seconds
            lease = group.group_id, group.attempt
            state.groups.inherited.setdefault(row["engine_id"], []).append(lease)
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


def _train_prompts(ledger: Ledger, where: str) -> list[str]:
    rows = ledger.execute(
        f"SELECT prompt_id FROM groups WHERE purpose = ? AND {where}", (Purpose.TRAIN,)
    )
    return [prompt_id for (prompt_id,) in rows]
