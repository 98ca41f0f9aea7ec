"""`headway bench scale`: what is asked of simulated actors, who is timed, and the payloads."""

import pytest

from benchmarks.queue_arms import GROUP_SIZE
from benchmarks.scale import (
    WITNESSES,
    generation_seconds,
    groups_each,
    quantiles,
    shares,
    with_control,
)
from benchmarks.scale_arms import CALLS, manifest, payload_at
from queues.schema import summarize


@pytest.mark.parametrize(("actors", "each"), [(8, 32), (256, 1), (1024, 1)])
def test_actors_give_the_rate_that_is_asked(actors, each):
    assert groups_each(actors) == each
    seconds = generation_seconds(actors, 200.0)
    assert actors * each / seconds == pytest.approx(200.0)
    assert generation_seconds(actors, 0.0) == 0.0


def test_a_few_are_timed_and_everybody_is_simulated_once():
    names = [f"engine-{number:02d}" for number in range(WITNESSES + 5)]
    first, *rest = shares(names, 2)
    assert first == names[:WITNESSES]
    assert sorted([*first, *(name for share in rest for name in share)]) == names
    assert [len(share) for share in rest] == [3, 2]
    assert shares(names[:8], 2) == [names[:8]]


@pytest.mark.parametrize("version", [0, 7])
def test_payloads_are_sampled_at_the_version_that_is_served(version):
    found = summarize(payload_at(100, version))
    assert (found.oldest_version, found.newest_version) == (version, version)
    assert (found.rollouts, found.tokens) == (GROUP_SIZE, GROUP_SIZE * 97)
    assert manifest(version).version == version


def test_control_is_what_waits_for_nobody():
    seconds = {call: [float(place)] for place, call in enumerate(CALLS)}
    assert with_control(seconds)["control"] == [
        float(CALLS.index(call)) for call in ("put", "heartbeat", "serving")
    ]
    assert quantiles([]) is None
    found = quantiles([float(value) for value in range(200, 0, -1)])
    assert found == {"count": 200, "p50": 101.0, "p99": 199.0, "max": 200.0}
