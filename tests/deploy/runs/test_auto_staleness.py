"""A whole run that sets its window of staleness, from the command line."""

import itertools

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed]


def test_a_run_narrows_its_window_within_the_ceiling_and_says_why(headway):
    run = headway.finish(
        "auto", "queues.max_staleness=auto", "queues.staleness_ceiling=2", "queues.ess_batches=1",
        "queues.ess_target=0.01", "steps=16", "heldout.sampled=false", "heldout.every=16",
    )  # fmt: skip
    rows = run.rows("metrics.jsonl")
    windows = [row["staleness_window"] for row in rows]
    assert windows[0] == run.summary["max_staleness"] == 2
    assert max(windows) <= 2
    assert run.summary["max_lag_trained"] <= 2
    assert rows[-1]["auto_staleness"]["limit"]
    moves = sum(a != b for a, b in itertools.pairwise(windows))
    assert headway.call("report", run.folder).returncode == 0
    assert (run.folder / "report.html").read_text().count("staleness window") >= moves
