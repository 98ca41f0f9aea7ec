"""What the broker shows of itself."""

from prometheus_client import CollectorRegistry

from headway.metrics import public_address
from queues.broker.metrics import BrokerMetrics
from queues.broker.status import status_of
from queues.config import QueuesConfig, RunSpec
from queues.records import Prompt, PutStatus
from queues.state.broker_state import BrokerState
from queues.state.groups import State


def test_what_binds_to_every_address_is_found_at_that_of_its_node():
    assert public_address("127.0.0.1", 80, node="10.0.0.7") == "127.0.0.1:80"
    assert public_address("0.0.0.0", 80, node="10.0.0.7") == "10.0.0.7:80"


def new_state():
    return BrokerState(
        config=QueuesConfig(max_staleness=1, max_attempts=1),
        spec=RunSpec(groups_per_batch=2, group_size=2, steps=9),
    )


def test_groups_leases_and_engines_are_counted_as_the_state_has_them():
    state = new_state()
    registry = CollectorRegistry()
    registry.register(BrokerMetrics(lambda: status_of(state, -1, paused=None)))

    def value(name, **labels):
        return registry.get_sample_value(f"headway_{name}", labels)

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


def test_age_of_the_oldest_prompt_and_refused_results_by_reason():
    state = new_state()
    registry = CollectorRegistry()
    registry.register(BrokerMetrics(lambda: status_of(state, -1, paused=None)))
    assert registry.get_sample_value("headway_queued_oldest_seconds") == 0
    for group in state.issue([Prompt(prompt_id=f"p/0/{index}", text="a") for index in range(2)]):
        group.queued_at -= 100.0 / group.number
    state.answers[PutStatus.FENCED] += 1
    assert 100 <= registry.get_sample_value("headway_queued_oldest_seconds") < 110
    for reason, count in {"duplicate": 0, "fenced": 1}.items():
        name = "headway_results_refused_total"
        assert registry.get_sample_value(name, {"reason": reason}) == count
