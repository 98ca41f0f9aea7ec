"""Figures of a run's deltas, by hand."""

import pytest

from benchmarks.weights.delta_share import shares
from weight_sync.announcements import WeightUpdateReport


def swap(codec: str, nbytes: int, changed: float | None, **more) -> WeightUpdateReport:
    return WeightUpdateReport(
        engine_id="e0",
        version=1,
        published_at=0.0,
        codec=codec,
        bytes=nbytes,
        full_bytes=100,
        changed=changed,
        **more,
    )


def test_shares_are_of_deltas_and_bytes_of_all_updates_but_first_ones_and_failures() -> None:
    found = shares(
        [
            swap("full", 100, None, seeding=True),
            swap("delta", 20, 0.1),
            swap("delta", 40, 0.2, error="late"),
            swap("full", 100, 0.9),
            swap("delta", 30, 0.3),
        ]
    )
    assert (found["updates"], found["by_delta"]) == (3, 2)
    assert found["changed"] == [0.1, 0.3]
    assert found["bytes_share"] == pytest.approx([0.2, 0.3])
    assert (found["bytes"], found["full_bytes"]) == (150, 300)
