"""The broker: the prompt queue and the results queue of a run, in one event loop.

    feeder   prompts_wanted ─▶ issue ─▶ │ queued │ ─▶ lease        worker (also serving, heartbeat)
    driver               evaluate ────▶ │ leased │ ◀─ put, fail    worker
    supervisor            release ────▶ │        │
    learner                    take ◀── │ ready  │
    learner                     ack ──▶ │ taken  │ ─▶ trained

    waiting call       waits for                         is woken by
    lease              prompts that admission allows     issue, evaluate, serving, ack, fail, the
                                                         end of patience or of a failed group's wait
    take, evaluation   ready groups, the last result     put, fail, ack
    prompts_wanted     a prompt queue that is too short  lease, ack, fail
    (lost and released leases, filtered results and takes that leave stragglers wake as fail does)

The broker consists of three parts, one for each protocol of `queues.protocols`, which share one
`CommitPipeline`. The state decides without awaiting; the pipeline makes the decision durable; only
then is the caller answered. So a broker that is killed at any moment continues from its ledger.
"""

from dataclasses import replace
from pathlib import Path

from headway.file_lock import TEST_SECONDS
from queues.broker.batch_queue import BrokerBatchQueue
from queues.broker.commit_pipeline import CommitPipeline
from queues.broker.prompt_feed import BrokerPromptFeed
from queues.broker.recovery import recover
from queues.broker.retention import Retention
from queues.broker.status import BrokerStatus, status_of
from queues.broker.work_queue import BrokerWorkQueue
from queues.config import QueuesConfig, RunSpec
from queues.readers.accounting import Accounting, account
from queues.state.broker_state import BrokerState
from queues.storage.backup import Backup, check_backup
from queues.storage.journal import Journal
from queues.storage.ledger import Ledger
from queues.storage.ledger_schema import JOURNAL_NAME, OWNER, SESSION, sessions_of


class Broker(BrokerPromptFeed, BrokerWorkQueue, BrokerBatchQueue):
    """Both queues of one run; all calls belong to one event loop.

    Args:
        directory: The run's folder, on a local disk; holds `ledger.sqlite` and `journal/`. A run
            that it holds already is continued.
        config: Section `[queues]`.
        spec: Size of the run's batches and groups.
        session: What this session of the run begins with, as JSON, which the ledger keeps.
        owner: Name of the broker, by which one goes on with its leases (`queues.broker.recovery`).
        probe_seconds: Interval between probes of a full disk, while the broker pauses.

    Raises:
        InputError: No batch could be trained, or the run was begun with other sizes.
        LedgerError: The ledger cannot be opened, is damaged, or another broker uses it.
    """

    predecessor_seconds = 10.0
    """Longest wait for a broker of this run that was killed to give up its lock."""

    def __init__(
        self,
        directory: Path,
        *,
        config: QueuesConfig,
        spec: RunSpec,
        session: str | None = None,
        owner: str | None = None,
        probe_seconds: float = 1.0,
    ) -> None:
        state = BrokerState(config=config, spec=spec)
        if spec.backup is not None:
            check_backup(directory, spec.backup)
        lock_seconds = TEST_SECONDS if owner is None else self.predecessor_seconds
        ledger = Ledger(directory, synchronous=config.synchronous, lock_seconds=lock_seconds)
        try:
            goes_on = recover(ledger, state, owner=owner)
            if session is not None and not goes_on:
                number = len(sessions_of(ledger.database))
                ledger.remember(f"{SESSION}{number:06d}", session)
            ledger.note(OWNER, owner or "")
            journal = Journal(directory / JOURNAL_NAME, segment_bytes=config.segment_bytes)
            if spec.backup is not None:
                ledger.backup = Backup(
                    directory,
                    spec.backup,
                    ledger.database,
                    seconds=spec.backup_seconds,
                    probe_seconds=probe_seconds,
                )
        except BaseException:
            ledger.close()
            raise
        commits = CommitPipeline(state, ledger, journal, probe_seconds=probe_seconds)
        retention = Retention(directory, commits)
        BrokerPromptFeed.__init__(self, commits)
        BrokerWorkQueue.__init__(self, commits, retention)
        BrokerBatchQueue.__init__(self, commits, retention)

    async def accounting(self) -> Accounting:
        """Count the ledger's rows and compare them with the broker's memory."""
        self.commits.check_open()
        memory = dict(self.commits.state.groups.counts)
        return account(await self.commits.submit(self.commits.ledger.counts), memory)

    async def status(self, after: int = -1) -> BrokerStatus:
        """Return the status of the run, with the newest batches trained later than `after`."""
        return status_of(self.commits.state, after, paused=self.commits.paused)

    async def paused(self) -> str | None:
        """Return the reason why calls are answered late, for now; None normally."""
        return self.commits.paused

    async def resize(self, window: int) -> None:
        """Let another number of groups be live at once, such as for other numbers of engines."""
        state = self.commits.state
        if window != state.bounds.most_live:
            state.bounds = replace(state.bounds, most_live=window)
            self.commits.lease_polls.wake()

    async def close(self) -> None:
        """End long polls with QueueClosed and close; `ledger.sqlite` is then the whole ledger."""
        if self._watching is not None:
            self._watching.cancel()
        await self.commits.close()
