"""What the broker shows of itself."""

import pytest
from prometheus_client import CollectorRegistry

from headway.metrics import public_address
from queues.broker.metrics import BrokerMetrics
from queues.broker.status import status_of
from queues.records import Prompt, PutStatus
from queues.state.groups import State
from tests.queues.state.test_broker_state import make_state


def test_what_binds_to_every_address_is_found_at_that_of_its_node():
    assert public_address("127.0.0.1", 80, node="10.0.0.7") == "127.0.0.1:80"
    assert public_address("0.0.0.0", 80, node="10.0.0.7") == "10.0.0.7:80"


@pytest.fixture
def state():
    return make_state(max_attempts=1, steps=9)


@pytest.fixture
def value(state):
    """Return a function that returns the value of a metric."""
    registry = CollectorRegistry()
    registry.register(BrokerMetrics(lambda: status_of(state, -1, paused=None)))
    return lambda name, **labels: registry.get_sample_value(f"headway_{name}", labels)


def test_groups_leases_and_engines_are_counted_as_the_state_has_them(state, value):
    state.issue([Prompt(prompt_id=f"p/0/{index}", text="a") for index in range(3)])
    state.serving("engine-0", 0)
    state.lease("engine-0", 4, now=0.0, expires=9.0)
    first = state.groups.leased()[0]
    state.give_back(first, "reward_raised", now=0.0)
    assert value("groups", state=State.QUEUED) == 1
    assert value("groups", state=State.LEASED) == 1
    assert value("groups", state=State.FAILED) == 1
    assert value("groups_ended_total", state="failed", reason="reward_raised") == 1
    assert value("leases_given_back_total", reason="reward_raised") == 1
    assert value("live_groups") == 1
    assert value("window_groups") == 4
    assert value("engine_version", engine="engine-0") == 0
    assert value("steps") == 9


def test_age_of_the_oldest_prompt_and_refused_results_by_reason(state, value):
    assert value("queued_oldest_seconds") == 0
    for group in state.issue([Prompt(prompt_id=f"p/0/{index}", text="a") for index in range(2)]):
        group.queued_at -= 100.0 / group.number
    state.answers[PutStatus.FENCED] += 1
    assert 100 <= value("queued_oldest_seconds") < 110
    for reason, count in {"duplicate": 0, "fenced": 1}.items():
        assert value("results_refused_total", reason=reason) == count
