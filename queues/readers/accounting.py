"""The accounts of a run, read from its ledger: is every issued group in exactly one state?"""

import json
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from queues.errors import AccountingError
from queues.readers.open_run import open_ledger
from queues.records import Purpose
from queues.state.groups import State, StateCounts
from queues.storage.state_counts import Counts, count_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The train groups of a run by state; dropped and failed groups by reason.

    issued = queued + leased + ready + taken + trained + Σ dropped + Σ failed
    """

    issued: int
    """Counted when they are issued, not by adding up the states."""
    queued: int
    leased: int
    ready: int
    taken: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    trained_twice: int
    duplicates: int
    """Results that were refused: of lost leases, or of groups that have one."""
    heldout_failed: dict[str, int]
    """Held-out rollouts that failed for good, by reason; they are not among the train groups."""
    balanced: bool
    """The states add up to what was issued, and agree with the recorded batches and, in a running
    broker, with its memory."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values that `headway inspect --json` prints."""
        return asdict(self)


def read_accounting(run_directory: Path, *, verify: bool = True) -> Accounting:
    """Return the accounts of a run, running or not; `verify` is that of `open_ledger`."""
    with open_ledger(run_directory, verify=verify) as database:
        return account(count_rows(database))


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """A group that failed for good."""

    prompt_id: str
    group_id: str
    purpose: str
    attempts: int
    reason: str
    error: str
    """Error of the last attempt."""


def failed_prompts(database: sqlite3.Connection) -> list[FailedPrompt]:
    """Return every group of an open ledger that failed for good, in the order of issue."""
    rows = database.execute(
        "SELECT prompt_id, group_id, purpose, attempt, reason, coalesce(error, '')"
        " FROM groups WHERE state = 'failed' ORDER BY number"
    )
    return [FailedPrompt(*row) for row in rows]


def read_batches(run_directory: Path, *, verify: bool = True) -> list[dict[str, Any]]:
    """Return the statistics of every trained batch with its `version`, oldest first."""
    with open_ledger(run_directory, verify=verify) as database:
        rows = database.execute(
            "SELECT version, statistics FROM batches WHERE acked_at IS NOT NULL ORDER BY version"
        )
        return [{"version": version, **json.loads(text)} for version, text in rows]


def account(counts: Counts, memory: StateCounts | None = None) -> Accounting:
    """Return the accounts of counted rows, compared with a running broker's memory if given."""
    states = {state: _by_reason(counts.states, state) for state in State}
    totals = {state: sum(reasons.values()) for state, reasons in states.items()}
    return Accounting(
        issued=counts.issued,
        queued=totals[State.QUEUED],
        leased=totals[State.LEASED],
        ready=totals[State.READY],
        taken=totals[State.TAKEN],
        trained=totals[State.TRAINED],
        dropped=states[State.DROPPED],
        failed=states[State.FAILED],
        trained_twice=counts.trained_twice,
        duplicates=counts.duplicates,
        heldout_failed=_by_reason(counts.states, State.FAILED, Purpose.EVALUATE),
        balanced=(
            counts.issued == sum(totals.values())
            and counts.in_batches == {False: totals[State.TAKEN], True: totals[State.TRAINED]}
            and counts.trained_twice == 0
            and (memory is None or memory == counts.states)
        ),
    )


def require_balanced(counts: Counts, memory: StateCounts, *, where: str) -> None:
    """Raise AccountingError unless counted rows and a broker's memory agree and add up."""
    if not account(counts, memory).balanced:
        raise AccountingError(
            f"{where}: the groups do not add up: in the ledger {counts}, in memory {memory}"
        )


def _by_reason(states: StateCounts, wanted: State, of: Purpose = Purpose.TRAIN) -> dict[str, int]:
    return {
        reason: count
        for (purpose, state, reason), count in states.items()
        if purpose is of and state is wanted
    }
