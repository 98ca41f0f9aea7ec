"""`headway bench queue`: what it puts is what was leased, and its figures are medians of rounds."""

import inspect
from dataclasses import replace

import pytest

from benchmarks.broker.ceilings import EmptyBroker
from benchmarks.broker.load import GROUP_SIZE, make_lease, payload_of
from benchmarks.broker.queue import conclude
from benchmarks.broker.queue import summarize as medians
from queues.ray_broker import BrokerActor
from queues.schema import summarize


@pytest.mark.parametrize(
    ("tokens", "version", "rollouts"), [(100, 0, GROUP_SIZE), (1000, 7, GROUP_SIZE), (100, 7, 1)]
)
def test_a_payload_is_made_for_its_lease_and_sampled_at_the_served_version(
    tokens, version, rollouts
):
    lease = replace(make_lease(12345), start_version=version)
    summary = summarize(payload_of(lease, tokens, rollouts))
    assert (summary.group_id, summary.prompt_id) == ("g00012345", "bench/0/00012345")
    assert (summary.oldest_version, summary.newest_version) == (version, version)
    assert (summary.rollouts, summary.tokens) == (rollouts, rollouts * (tokens - 3))


CALLS = [name for name in vars(EmptyBroker) if not name.startswith("_")]


@pytest.mark.parametrize("name", CALLS)
def test_the_ceiling_of_messages_takes_the_calls_of_the_broker(name):
    ours, brokers = (inspect.signature(getattr(kind, name)) for kind in (EmptyBroker, BrokerActor))
    assert list(ours.parameters) == list(brokers.parameters)


def test_ratios_are_medians_of_those_of_each_round() -> None:
    def round_(broker: float, empty: float, ratio: float) -> dict:
        rates = {"broker": broker, "empty": empty, "disk": 9.0, "ray_queue": 1.0}
        rows = {
            name: {"groups_per_second": rate, "megabytes_per_second": 2 * rate}
            for name, rate in rates.items()
        }
        return rows | {"of_ceiling": ratio, "of_ray_queue": broker}

    figures = medians([round_(1.0, 2.0, 0.5), round_(3.0, 3.0, 1.0), round_(4.0, 5.0, 0.8)])
    assert figures["of_ceiling"] == 0.8
    assert figures["of_ray_queue"] == 3.0
    assert figures["broker_groups_per_second"] == 3.0
    assert figures["broker_megabytes_per_second"] == 6.0


def test_every_aim_that_is_missed_is_named() -> None:
    good = {"tokens": 100, "actors": 4, "of_ceiling": 0.7, "of_ray_queue": 5.0}
    record = {"settings": [good], "soak": {"growth": 0.05}}
    assert conclude(record) == {"misses": []}
    assert conclude({"settings": [good]}) == {"misses": []}, "before the other parts"
    slow = {"tokens": 8000, "actors": 1, "of_ceiling": 0.69, "of_ray_queue": 0.9}
    record["settings"].append(slow)
    record |= {"soak": {"growth": 0.06}}
    assert conclude(record)["misses"] == [
        "8000 tokens, 1 actors: 0.69 of the ceiling, aim 0.7",
        "8000 tokens, 1 actors: 0.9 × ray.util.queue, aim 1",
        "memory grows by 6%, aim 5%",
    ]
