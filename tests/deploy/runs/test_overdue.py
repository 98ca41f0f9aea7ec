"""Whole runs that do not wait for stragglers, from the command line."""

import pytest

from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import report_bias

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed]

STRAGGLERS = (
    "steps=10", "queues.max_staleness=1", "heldout.sampled=false", "heldout.every=10",
    "actors.max_new_tokens=120", "queues.heartbeat_seconds=0.2",
    "actors.scripted_options={tokens_per_second = 40.0, median_length = 12, length_sigma = 1.3}",
)  # fmt: skip


@pytest.fixture(scope="module", params=["drop", "mask", "train"])
def policy(request):
    return request.param


@pytest.fixture(scope="module")
def run(headway, policy):
    """Provide a run that has stragglers, and sends weights over the object store."""
    settings = (f"queues.on_overdue={policy}", "queues.ess_target=0.5", *STRAGGLERS)
    return headway.finish(policy, "weight_sync.transport=object_store", *settings)


def test_a_run_goes_on_past_its_stragglers_and_tells_what_became_of_them(run, policy):
    summary, rows = run.summary, run.rows("metrics.jsonl")
    accounts = summary["accounting"]
    assert (summary["version"], accounts["trained"], accounts["balanced"]) == (10, 20, True)
    overdue = rows[-1]["groups_overdue"]
    assert overdue > 0
    assert (summary["max_lag_trained"] > 1) == (policy == "train")
    with open_ledger(run.folder) as database:
        report = report_bias(database)
    if policy == "drop":
        assert overdue == accounts["dropped"]["overdue"] == report.groups["dropped"]
        assert report.bias > 1.0
    else:
        assert accounts["dropped"] == {}
        assert (report.groups["late"], report.bias) == (overdue, 1.0)
    too_old = sum(row.get("tokens_too_old", 0) for row in rows)
    assert (too_old > 0) == (policy == "mask")
    assert {row["staleness_window"] for row in rows} <= {0, 1}


def test_a_run_over_the_object_store_sends_all_weights_of_every_version(run):
    assert run.summary["weight_sync"]["failed"] == 0
    swaps = run.rows("swaps.jsonl")
    assert {swap["codec"] for swap in swaps} == {"full"}
    assert swaps[-1]["bytes"] == swaps[-1]["full_bytes"] > 0
