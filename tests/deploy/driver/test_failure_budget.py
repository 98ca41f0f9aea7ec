"""The limit on failed groups is a rate: failures that are long ago do not count."""

from deploy.driver.failure_budget import FailureBudget


def depth(trained, failed):
    return {"queued": 9, "leased": 5, "trained": trained, "failed": failed}


def test_failures_of_earlier_sessions_do_not_count():
    budget = FailureBudget(allowed=2, window=100)
    assert [budget.exceeded(depth(50, n)) for n in (7, 8, 9, 10)] == [None, None, None, 3]


def test_a_steady_rate_below_the_limit_never_ends_a_run():
    budget = FailureBudget(allowed=10, window=100)
    assert not [n for n in range(1000) if budget.exceeded(depth(19 * n, n))]


def test_a_rate_above_it_does_however_long_the_run_was():
    budget = FailureBudget(allowed=10, window=100)
    assert not [n for n in range(500) if budget.exceeded(depth(100 * n, n))]
    counts = [budget.exceeded(depth(50_000 + 5 * n, 500 + n)) for n in range(20)]
    assert next(n for n, failed in enumerate(counts) if failed) <= 11


def test_no_failure_at_all_may_be_demanded():
    budget = FailureBudget(allowed=0, window=1)
    assert budget.exceeded(depth(0, 0)) is None
    assert budget.exceeded(depth(0, 1)) == 1
