"""Section [queues]: what it allows, and that what would not work is refused with the reason."""

import pytest
from pydantic import ValidationError

from queues.config import QueuesConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_staleness": -1}, "max_staleness"),
        ({"on_overdue": "panic"}, "on_overdue"),
        ({"commit_interval_seconds": 0.2}, "commit_interval_seconds"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"retry_seconds": -1}, "retry_seconds"),
        ({"ess_target": 1.0}, "ess_target"),
        ({"ess_batches": 0}, "ess_batches"),
        ({"queued_batches": 0}, "queued_batches"),
        ({"staleness": 2}, "staleness\n.*Extra inputs are not permitted"),
        ({"lease_seconds": 5, "heartbeat_seconds": 3}, "lease_seconds = 5 must be at least twice"),
    ],
)
def test_what_would_not_work_is_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        QueuesConfig(**values)
