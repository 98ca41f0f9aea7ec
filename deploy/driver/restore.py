"""Restores the record of a run from its folder when it is resumed.

The ledger has every batch; the driver's own files may end a little earlier and are repaired.
"""

import json
from collections import Counter
from dataclasses import asdict

from deploy.config.run_config import RunConfig
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Earlier, Record
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.accounting import read_batches
from weight_sync.announcements import WeightUpdateReport


def restore(config: RunConfig, directory: RunDirectory, *, now: float) -> Record:
    """Return the record that a session begun at `now` (epoch seconds) goes on with.

    It is empty for a new run.
    """
    record = Record(
        name=config.name,
        steps=config.steps,
        max_staleness=config.queues.max_staleness,
        started_at=now,
    )
    if directory.ledger.exists():
        record.batches = [TrainedBatch.from_dict(row) for row in read_batches(directory.path)]
        record.swaps = [WeightUpdateReport(**row) for row in directory.rows("swaps.jsonl")]
        restarts = directory.rows("restarts.jsonl")
        record.restarts = Counter(restart["actor"] for restart in restarts)
        directory.rewrite("metrics.jsonl", [batch.to_dict() for batch in record.batches])
        directory.rewrite("swaps.jsonl", [asdict(report) for report in record.swaps])
        directory.rewrite("restarts.jsonl", restarts)
    if directory.summary_file.exists():
        summary = json.loads(directory.summary_file.read_text())
        record.earlier = Earlier(**{name: summary[name] for name in Earlier.__dataclass_fields__})
        record.heldout, record.heldout_sampled = summary["heldout"], summary["heldout_sampled"]
    return record
