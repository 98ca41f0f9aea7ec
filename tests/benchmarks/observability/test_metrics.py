"""`headway bench metrics`: what a step takes, and what shares of it go where."""

import pytest

from benchmarks.observability.measured_run import WARM_UP, step_seconds
from benchmarks.observability.metrics_cost import shares
from learner.diagnostics.batch_report import TrainedBatch


def test_a_step_is_the_median_of_those_after_the_warm_up():
    ends = [*[0.0] * WARM_UP, 500.0, 502.0, 504.0, 510.0]
    rows = [{"version": 0, "weights_checksum": "", "published_at": end} for end in ends]
    assert step_seconds([TrainedBatch.from_dict(row) for row in rows]) == 2.0


def test_what_happens_at_intervals_costs_its_seconds_over_the_interval():
    measured = {
        "scrape": {"cpu_seconds": 0.02},
        "look": {"cpu_seconds": 0.02},
        "look_seconds": 2.0,
        "ping": {"cpu_seconds": 0.004},
        "ping_seconds": 2.0,
        "note_seconds": 1e-3,
        "step_seconds": 2.0,
    }
    expected = {"scrapes": 0.002, "watchdog": 0.01, "pings": 0.002, "notes": 5e-4}
    assert shares(measured, interval=10.0) == pytest.approx(expected)
