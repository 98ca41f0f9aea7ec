"""Section [queues]: what it allows, and that what would not work is refused with the reason."""

import pytest
from pydantic import ValidationError

from queues.config import QueuesConfig, RunSpec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_staleness": -1}, "max_staleness"),
        ({"max_staleness": "often"}, "max_staleness"),
        ({"max_staleness": "auto", "staleness_ceiling": 0}, "staleness_ceiling"),
        (
            {"staleness_ceiling": 4},
            'staleness_ceiling = 4 is for max_staleness = "auto", and max_s',
        ),
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


def test_the_bound_is_a_number_also_where_the_run_sets_its_window():
    assert QueuesConfig(max_staleness=3).bound == 3
    assert QueuesConfig(max_staleness="auto").bound == 8
    auto = QueuesConfig(max_staleness="auto", staleness_ceiling=4, ess_target=0.5)
    assert auto.bound == auto.bounds(RunSpec(groups_per_batch=1, group_size=1, steps=9)).deadline(0)
    controller = auto.controller()
    assert (controller.most, controller.floor, controller.batches) == (4, 0.5, 4)
    assert QueuesConfig(max_staleness="auto").controller().floor == 0.9
