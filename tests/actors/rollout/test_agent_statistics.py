"""Counters of agents' sessions: time by who was waited for, and warnings about what is lost."""

import asyncio
import logging
from contextlib import suppress

import pytest
from fakes import Recited, episodes, lease
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from actors.engines.protocol import SamplingParameters
from actors.environments.protocol import Message, Turn
from actors.metrics import ActorMetrics
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.agent_statistics import (
    ADVICE,
    LEAST,
    NEWEST,
    SHARE,
    AgentStatistics,
    merge_agents,
)
from headway import clock


@pytest.fixture
def at(monkeypatch):
    """Set the time that the code under test reads."""
    moment = [100.0]
    monkeypatch.setattr(clock, "now", lambda: moment[0])
    return moment


def counted(*rollouts):
    """Count rollouts of (turns, segments, sampled tokens, tokens left out by reason)."""
    statistics = AgentStatistics()
    statistics.agent = "program:x"
    for turns, segments, sampled, left_out in rollouts:
        statistics.count(turns=turns, segments=segments, sampled=sampled, left_out=left_out)
    return statistics


def test_time_of_a_session_is_that_of_the_model_or_of_the_agent(at):
    statistics, model = AgentStatistics(), [0.0]
    with statistics.session(lambda: model[0]):
        assert statistics.sessions == 1
        at[0] += 10.0
        model[0] = 4.0
    with suppress(ZeroDivisionError), statistics.session(lambda: 1.0):
        at[0] += 2.0
        raise ZeroDivisionError
    assert statistics.sessions == 0
    assert statistics.seconds == {"model": 5.0, "agent": 7.0, "environment": 0.0}


@pytest.mark.parametrize("reason", [*ADVICE, "another"])
def test_tokens_left_out_are_warned_about_once_with_the_reason_and_what_to_do(caplog, reason):
    lossy = (10, 0, 80, {reason: 15})
    with caplog.at_level(logging.WARNING):
        counted(*[lossy] * 9)
        assert not caplog.records, f"{LEAST} turns are not there yet"
        counted(*[lossy] * 30)
    [record] = caplog.records
    told = record.getMessage()
    assert told.startswith("agent 'program:x': 150 of the 950 tokens sampled in the last 100 turns")
    assert repr(reason) in told
    assert ADVICE.get(reason, "left_out") in told


def test_turns_that_begin_further_segments_are_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING):
        counted(*[(10, 1, 100, {})] * 20)
        assert not caplog.records, "a tenth is not too much"
        counted(*[(10, 1, 100, {})] * 9, *[(10, 2, 100, {})] * 20)
    [record] = caplog.records
    assert "11 of the last 100 turns began a further segment" in record.getMessage()
    assert "send earlier messages as they were" in record.getMessage()


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 400), st.integers(0, 60), st.integers(0, 60)),
        max_size=30,
    )
)
def test_only_the_newest_turns_are_judged_and_all_are_counted(rollouts):
    rows = [(t, min(s, t), kept, {"undelivered": lost}) for t, s, kept, lost in rollouts]
    statistics = AgentStatistics()
    expected = set()
    for n, row in enumerate(rows):
        turns, segments, sampled, left_out = row
        statistics.count(turns=turns, segments=segments, sampled=sampled, left_out=left_out)
        window = []
        for older in reversed(rows[: n + 1]):
            window.append(older)
            if sum(part[0] for part in window) >= NEWEST:
                break
        turns, segments, kept = (sum(part[i] for part in window) for i in range(3))
        lost = sum(part[3]["undelivered"] for part in window)
        if turns >= LEAST:
            expected |= {"segments"} if segments > SHARE * turns else set()
            expected |= {"left out"} if lost > SHARE * (lost + kept) else set()
        assert statistics._warned == expected
    assert statistics.segments == sum(row[1] for row in rows)
    assert statistics.left_out["undelivered"] == sum(row[3]["undelivered"] for row in rows)


def test_lives_of_an_actor_add_up():
    first = counted((5, 1, 9, {"undelivered": 2}))
    first.turns, first.sessions = 5, 3
    second = AgentStatistics()
    second.agent, second.turns, second.sessions = "program:x", 2, 1
    second.seconds["agent"] = 4.0
    assert merge_agents([first.statistics(), second.statistics()]) == {
        "agent": "program:x", "sessions": 1, "turns": 7, "segments": 1, "sampled": 9,
        "left_out": dict.fromkeys(ADVICE, 0) | {"undelivered": 2},
        "seconds": {"model": 0.0, "agent": 4.0, "environment": 0.0},
    }  # fmt: skip


def test_every_counter_is_exported_from_0_on():
    statistics = ActorStatistics("engine-0")
    registry = CollectorRegistry()
    registry.register(ActorMetrics(statistics))

    def value(name, **labels):
        return registry.get_sample_value(f"headway_{name}", labels)

    assert value("agent_tokens_left_out_total", reason="undelivered") == 0
    agents = statistics.agents
    agents.turns, agents.sessions, agents.segments = 7, 2, 1
    agents.left_out["not repeated"] = 5
    agents.seconds.update(model=1.5, agent=2.5, environment=3.5)
    assert value("agent_sessions") == 2
    assert value("agent_turns_total") == 7
    assert value("agent_segments_total") == 1
    assert value("agent_tokens_left_out_total", reason="not repeated") == 5
    assert value("agent_seconds_total", waiting_for="model") == 1.5
    assert value("agent_seconds_total", waiting_for="agent") == 2.5
    assert value("environment_seconds_total") == 3.5


def test_the_time_of_an_environments_answers_is_counted():
    class Slow:
        def reset(self, prompt):
            return [Message("user", prompt.text)]

        async def step(self, message):
            loop = asyncio.get_running_loop()
            before = loop.time
            loop.time = lambda: before() + 2.0
            return Turn([], 1.0, done=True)

    runner = episodes(
        Recited("=7"), SamplingParameters(temperature=1.0, max_new_tokens=9),
        environment="mine:Slow", new_environment=Slow,
    )  # fmt: skip
    asyncio.run(runner.run(lease(), 0))
    assert 2.0 <= runner.statistics.seconds["environment"] < 3.0
