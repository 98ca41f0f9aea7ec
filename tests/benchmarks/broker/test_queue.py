"""`headway bench queue`: what it puts is what was leased, and its figures are medians of rounds."""

import pytest

from benchmarks.broker.queue import misses, quantiles, summarise
from benchmarks.broker.queue_arms import GROUP_SIZE, payload_of, prompt_id, template
from queues.records import Lease, Prompt, Purpose
from queues.schema import summarize


@pytest.mark.parametrize("tokens", [100, 1000])
def test_a_payload_is_made_for_its_lease(tokens: int) -> None:
    lease = Lease(
        group_id="g00012345",
        attempt=1,
        prompt=Prompt(prompt_id=prompt_id(678), text="1+1="),
        group_size=GROUP_SIZE,
        purpose=Purpose.TRAIN,
        temperature=None,
        start_version=0,
        deadline_version=9,
    )
    found = summarize(payload_of(lease, template(tokens)))
    assert (found.group_id, found.prompt_id) == ("g00012345", "bench/0/00000678")
    assert (found.rollouts, found.tokens) == (GROUP_SIZE, GROUP_SIZE * (tokens - 3))


def test_ratios_are_medians_of_those_of_each_round() -> None:
    def round_(broker: float, empty: float, ratio: float) -> dict:
        rates = {"broker": broker, "empty": empty, "disk": 9.0, "ray_queue": 1.0}
        arms = {
            arm: {"groups_per_second": rate, "megabytes_per_second": 2 * rate}
            for arm, rate in rates.items()
        }
        return arms | {"of_ceiling": ratio, "of_ray_queue": broker}

    figures = summarise([round_(1.0, 2.0, 0.5), round_(3.0, 3.0, 1.0), round_(4.0, 5.0, 0.8)])
    assert figures["of_ceiling"] == 0.8
    assert figures["of_ray_queue"] == 3.0
    assert figures["broker_groups_per_second"] == 3.0
    assert figures["broker_megabytes_per_second"] == 6.0


def test_the_quantiles_are_of_the_sorted_values() -> None:
    assert quantiles([float(value) for value in range(100, 0, -1)]) == (51.0, 100.0, 100.0)


def test_every_aim_that_is_missed_is_named() -> None:
    good = {"tokens": 100, "actors": 4, "of_ceiling": 0.7, "of_ray_queue": 5.0}
    assert misses([good], {"served": {"least": 1}}, {"growth": 0.05}) == []
    slow = {"tokens": 8000, "actors": 1, "of_ceiling": 0.69, "of_ray_queue": 0.9}
    assert misses([good, slow], {"served": {"least": 0}}, {"growth": 0.06}) == [
        "8000 tokens, 1 actors: 0.69 of the ceiling, aim 0.7",
        "8000 tokens, 1 actors: 0.9 × ray.util.queue, aim 1",
        "some of many actors were never served",
        "memory grows by 6%, aim 5%",
    ]
