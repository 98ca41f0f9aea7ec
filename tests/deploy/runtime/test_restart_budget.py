"""The restarts of a process: how many in a row, and how far apart."""

import pytest

from deploy.runtime.restart_budget import LONGEST_WAIT_SECONDS, RestartBudget


@pytest.mark.parametrize("limit", [0, 1, 8])
def test_waits_double_up_to_the_longest_until_the_limit(limit):
    budget = RestartBudget(limit)
    waits = [budget.next_wait(settled=False) for _ in range(limit + 1)]
    assert waits[:limit] == [min(2.0**n, LONGEST_WAIT_SECONDS) for n in range(limit)]
    assert waits[limit] is None
    assert budget.exhausted("actor-3", "boom") == (
        f"actor-3 died {limit + 1} times in a row, more than deploy.max_restarts = {limit} makes "
        "up for; the last error: boom"
    )


def test_a_process_that_had_worked_counts_anew():
    budget = RestartBudget(2)
    waits = [budget.next_wait(settled=settled) for settled in (False, False, True, False, False)]
    assert waits == [1.0, 2.0, 1.0, 2.0, None]
