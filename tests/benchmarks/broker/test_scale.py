"""`headway bench scale`: calls of simulated actors, which of them are timed, and conclusions."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import ClassVar

import pytest

from benchmarks.broker.queue_workers import GROUP_SIZE, make_lease, manifest
from benchmarks.broker.scale import STUDY, describe, missed, verdict
from benchmarks.broker.scale_rates import TIMED, generation_seconds, groups_each, quantiles, shares
from benchmarks.broker.scale_workers import (
    CALLS,
    ActorStatistics,
    Crowd,
    Generating,
    Pace,
    payload_at,
)
from queues.records import PutStatus
from queues.schema import summarize


@pytest.mark.parametrize(("actors", "each"), [(8, 32), (256, 1), (1024, 1)])
def test_actors_give_the_rate_that_is_asked(actors, each):
    assert groups_each(actors) == each
    seconds = generation_seconds(actors, 200.0)
    assert actors * each / seconds == pytest.approx(200.0)
    assert generation_seconds(actors, 0.0) == 0.0


def test_a_few_are_timed_and_everybody_is_simulated_once():
    names = [f"engine-{number:02d}" for number in range(TIMED + 5)]
    first, *rest = shares(names, 2)
    assert first == names[:TIMED]
    assert sorted([*first, *(name for share in rest for name in share)]) == names
    assert [len(share) for share in rest] == [3, 2]
    assert shares(names[:8], 2) == [names[:8]]
    assert [len(share) for share in shares(range(1024), 4)] == [128, 224, 224, 224, 224]


@pytest.mark.parametrize("version", [0, 7])
@pytest.mark.parametrize("rollouts", [1, GROUP_SIZE])
def test_payloads_are_sampled_at_the_version_that_is_served(version, rollouts):
    found = summarize(payload_at(100, version, rollouts))
    assert (found.oldest_version, found.newest_version) == (version, version)
    assert (found.rollouts, found.tokens) == (rollouts, rollouts * 97)
    assert manifest(version).version == version


def test_a_partial_group_is_saved_with_its_first_rollout_and_whenever_it_has_doubled():
    group = Generating(make_lease(1), began=100.0, seconds=8.0)
    saved = []
    for second in range(12):
        if due := group.due(100.5 + second):
            group.saved = due
            saved.append((second, due))
    assert saved == [(1, 1), (2, 2), (4, 4), (8, 8)]


class Client:
    """A broker of one actor: two leases at once, and none until a second later."""

    made: ClassVar[list["Client"]] = []

    def __init__(self, handle):
        self.handle, self.calls = handle, []
        self.made.append(self)

    async def serving(self, engine_id, version):
        self.calls.append(("serving", version))

    async def lease(self, engine_id, room, timeout):
        self.calls.append(("lease", room, timeout))
        leased = sum(call[0] == "lease" and call[2] == 0.0 for call in self.calls)
        await asyncio.sleep(timeout)
        return [make_lease(number) for number in (1, 2)] * (leased == 1 and not timeout)

    async def put(self, engine_id, payload):
        self.calls.append(("put", summarize(payload).group_id, summarize(payload).rollouts))
        return PutStatus.ACCEPTED if b"g00000001" in payload else PutStatus.FENCED

    async def heartbeat(self, engine_id, held):
        self.calls.append(("heartbeat", *held))
        return []

    async def save(self, engine_id, payload):
        self.calls.append(("save", summarize(payload).group_id, summarize(payload).rollouts))


class Broadcaster:
    async def newest(self, after, timeout, digest):
        await asyncio.sleep(timeout)


def test_every_actor_has_a_client_of_its_own_and_calls_as_real_ones_do():
    Client.made.clear()

    async def play():
        names = ["engine-0", "engine-1"]
        pace = Pace(tokens=8, at_once=2, seconds=0.6, poll_seconds=0.2, heartbeat_seconds=0.05)
        crowd = Crowd(names, pace, Client)
        work = asyncio.create_task(crowd.run(SimpleNamespace(handle="broker"), Broadcaster()))
        await asyncio.sleep(1.5)
        await crowd.stop()
        await work
        return await crowd.puts(), await crowd.seconds()

    puts, seconds = asyncio.run(play())
    assert [client.handle for client in Client.made] == ["broker", "broker"]
    for client in Client.made:
        calls = client.calls
        assert calls[:2] == [("serving", 0), ("lease", 2 * GROUP_SIZE, 0.0)]
        assert {call for call in calls if call[0] == "put"} == {
            ("put", "g00000001", GROUP_SIZE),
            ("put", "g00000002", GROUP_SIZE),
        }
        asked = [call[2] for call in calls if call[0] == "lease"]
        assert asked[:2] == [0.0, 0.0]
        assert set(asked[2:]) == {0.2}, "an actor without a lease waits"
        assert ("heartbeat", ("g00000001", 1), ("g00000002", 1)) in calls
        saved = [call[2] for call in calls if call[:2] == ("save", "g00000001")]
        assert saved
        assert all(after >= 2 * before for before, after in pairwise(saved))
    assert puts == len(seconds["put"]) == 2, "what was refused is no put"
    assert set(seconds) == set(CALLS)


def test_only_what_is_accepted_is_a_put():
    async def answer(status):
        return status

    statistics = ActorStatistics()
    for status in PutStatus:
        asyncio.run(statistics.timed("put", answer(status)))
    assert len(statistics.seconds["put"]) == 1


def test_quantiles_are_of_what_was_timed():
    assert quantiles([]) is None
    found = quantiles([float(value) for value in range(200, 0, -1)])
    assert found == {"count": 200, "p50": 101.0, "p99": 199.0, "max": 200.0}


def setting(*, accepted=199.0, asked=200.0, **p99):
    seconds = dict.fromkeys(CALLS, 0.01) | p99
    return {
        "actors": 1024,
        "asked_groups_per_second": asked,
        "measured_seconds": 40.0,
        "accepted_groups_per_second": accepted,
        "refused": 3,
        "enough_puts": True,
        "seconds": {call: x and quantiles([x]) for call, x in seconds.items()},
        "scrape": quantiles([0.02]),
        "cores": {
            "broker": 0.4, "broadcaster": 0.1, "learner": 0.1, "crowd-0": 0.2, "crowd-1": 0.3
        },
        "broker_groups_per_core_second": 500.0,
        "megabytes": {"broker": 200.0, "broadcaster": 130.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"heartbeat": 9.0, "save": 9.0, "lease_poll": 9.0}, []),
        ({"put": 0.25}, ["put p99 250 ms, above 100"]),
        ({"lease": 0.125}, ["lease p99 125 ms, above 100"]),
        ({"lease": None}, ["no lease was timed"]),
        ({"accepted": 150.0}, ["150 groups/s accepted, not 0.95 of 200"]),
        ({"accepted": 150.0, "put": 0.25, "asked": None}, []),
    ],
)
def test_puts_and_leases_have_aims_of_their_own_and_the_rate_counts_accepted_puts(
    changes, expected
):
    figures = setting(**changes)
    assert missed(figures) == expected
    lines = describe(figures)
    assert lines[2:] == [f"      missed: {aim}" for aim in expected]
    assert f"{figures['accepted_groups_per_second']:.0f} groups/s accepted, 3 refused" in lines[0]
    assert "broker 0.40 cores 200 MB" in lines[0]
    assert all(f" {call} " in lines[1] for call in ("put", "lease", "heartbeat", "save"))


def test_a_measurement_with_few_puts_is_marked():
    figures = setting() | {"enough_puts": False}
    assert describe(figures)[2] == (
        "      only 1 puts were timed in 40 s: the 99th percentiles are of few"
    )


def test_the_verdict_names_the_reach_and_what_is_slow_beyond_it():
    fast = [setting(accepted=180.0, asked=180.0), setting(accepted=120.0, asked=None)]
    slow = setting(accepted=300.0, asked=None, put=0.5)
    aim = "p99 of puts and of leases at most 100 ms"
    assert verdict([*fast, slow]) == [
        f"{aim}: up to 180 groups/s, of 1024 actors",
        "beyond it: 1024 actors, 300 groups/s; put p99 500 ms, above 100",
    ]
    assert verdict([slow])[0] == f"{aim}: in no setting"
    assert len(verdict(fast)) == 1


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--actors", "0", "a whole number, at least 1"),
        ("--actors", "8.5", "a whole number, at least 1"),
        ("--rates", "-1", "a number, at least 0"),
        ("--rates", "inf", "a number, at least 0"),
    ],
)
def test_bad_input_is_one_message_before_anything_starts(capsys, option, value, allowed):
    with pytest.raises(SystemExit) as stopped:
        STUDY.parse([f"{option}={value}"])
    assert stopped.value.code == 2
    *usage, message = capsys.readouterr().err.splitlines()
    assert f"argument {option}: {value} must be {allowed}" in message
    assert "Traceback" not in "".join(usage)
