"""`headway bench queue` and `scale`: calls of simulated actors, which are timed, and aims."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.broker.load import (
    CALLS,
    GROUP_SIZE,
    Crowd,
    Generating,
    Pace,
    make_lease,
    payload_of,
)
from benchmarks.broker.queue import medians, misses
from benchmarks.broker.rates import TIMED, measure_ceiling, pace_of, quantiles, shares
from benchmarks.broker.scale import HEAD, SHOWN, missed, row, table
from queues.records import PutStatus
from queues.schema import summarize


@pytest.mark.parametrize(
    ("actors", "tokens", "at_once"), [(8, 100, 32), (1, 8000, 8), (256, 100, 1), (1024, 100, 1)]
)
def test_actors_give_the_rate_that_is_asked(actors, tokens, at_once):
    pace = pace_of(actors, 200.0, tokens)
    assert pace.at_once == at_once
    assert actors * at_once / pace.seconds == pytest.approx(200.0)
    assert pace_of(actors, 0.0, tokens).seconds == 0.0


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


def test_a_few_are_timed_and_everybody_is_simulated_once():
    names = [f"engine-{number:02d}" for number in range(TIMED + 5)]
    first, *rest = shares(names, 2)
    assert first == names[:TIMED]
    assert sorted([*first, *(name for share in rest for name in share)]) == names
    assert [len(share) for share in rest] == [3, 2]
    assert shares(names[:8], 2) == [names[:8]]
    assert [len(share) for share in shares(range(1024), 4)] == [128, 224, 224, 224, 224]


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

    def __init__(self, clients):
        self.handle, self.calls = clients, []
        clients.append(self)

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
    clients = []

    async def play():
        pace = Pace(tokens=8, at_once=2, seconds=0.6, poll_seconds=0.2, heartbeat_seconds=0.05)
        crowd = Crowd(["engine-0", "engine-1"], pace)
        work = asyncio.create_task(crowd.run(Client(clients), Broadcaster()))
        await asyncio.sleep(1.5)
        await crowd.stop()
        await work
        return await crowd.seconds()

    seconds = asyncio.run(play())
    given, *own = clients
    assert (given.calls, len(own)) == ([], 2)
    for client in own:
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
    assert len(seconds["put"]) == 2, "what was refused is no put"
    assert set(seconds) == set(CALLS)


def test_quantiles_are_of_what_was_timed():
    assert quantiles([]) is None
    timed = quantiles([float(value) for value in range(200, 0, -1)])
    assert timed == {"count": 200, "p50": 101.0, "p99": 199.0, "max": 200.0}


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
    assert missed(setting(**changes)) == expected


def test_a_row_has_every_figure_and_few_puts_are_marked():
    cells = dict(zip([*HEAD, *SHOWN], row(setting(lease=None)), strict=True))
    assert (cells["groups/s"], cells["actors: cores of the busiest process"]) == ("199", "0.30")
    assert (cells["put"], cells["lease"]) == ("10/10", "–")
    text = table({"settings": [setting() | {"enough_puts": False}]})
    assert "only 1 puts of 1024 actors were timed in 40 s" in text


def test_ratios_are_medians_of_those_of_each_round():
    rounds = [
        {"groups_per_second": rate, "of_ceiling": share, "raw": {}}
        for rate, share in ((1.0, 0.5), (3.0, 1.0), (4.0, 0.8))
    ]
    assert medians(rounds) == {"groups_per_second": 3.0, "of_ceiling": 0.8}


def test_a_setting_below_its_share_of_the_ceiling_misses_the_aim():
    rows = [{"tokens": 8000, "actors": actors, "of_ceiling": actors / 10} for actors in (6, 7)]
    assert misses({"settings": rows}) == ["1 of 2 settings have less than 0.7 of the ceiling"]


@pytest.mark.slow
@pytest.mark.ray
def test_the_ceiling_is_of_bytes_that_are_sent_and_synced(tmp_path, ray_cluster):
    assert measure_ceiling(100, tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
