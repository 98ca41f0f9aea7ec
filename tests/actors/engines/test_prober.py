"""An actor probes what its engine serves, beside its rollouts, and no failure there ends it."""

import asyncio

import pytest

from actors.engines.prober import Prober
from actors.engines.scripted import ScriptedEngine
from actors.errors import EngineDied
from headway.errors import InputError
from weight_sync.broadcaster import Broadcaster
from weight_sync.probe import LEARNER, ProbeReport

SEQUENCES = ((1, 2, 3),)
SCORES = ((-1.0, -2.0), (-2.0,))
"""Of every token, and as sampled."""


class Engine:
    """Answers with what it is given, or raises it, as soon as it may."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0
        self.may = asyncio.Event()
        self.may.set()

    async def score(self, sequences):
        assert sequences == SEQUENCES
        self.asked += 1
        await self.may.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def scored(broadcaster, *versions):
    for version in versions:
        await broadcaster.probed(
            ProbeReport(source=LEARNER, version=version, sequences=SEQUENCES, scores=(-1.0, -2.0))
        )


async def reports(engine, *versions, probing="always", learned=(0, 1)):
    """Return what the broadcaster has of the engine after it served these versions."""
    broadcaster = Broadcaster(1.0, 1)
    await scored(broadcaster, *learned)
    prober = Prober("engine-0", engine, broadcaster, probing)
    for version in versions:
        prober.begin(version)
        for _ in range(20):
            await asyncio.sleep(0)
    made = (await broadcaster.probes())[len(learned) :]
    return [(report.version, (report.scores, report.sampled)) for report in made]


async def test_versions_that_the_learner_scored_are_scored_and_no_others():
    assert await reports(Engine(SCORES, SCORES), 0, 1, 2) == [
        (0, SCORES), (1, SCORES),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [EngineDied("gone"), InputError("refused"), TimeoutError("late")])
async def test_a_probe_that_fails_is_logged_and_the_next_is_made(error, caplog):
    assert await reports(Engine(error, SCORES), 0, 1) == [(1, SCORES)]
    assert f"engine-0: version 0 is not probed: {error}" in caplog.text


async def test_a_probe_whose_weights_were_replaced_reports_nothing():
    assert await reports(Engine(None, SCORES), 0, 1) == [(1, SCORES)]


async def test_an_engine_without_a_model_and_one_that_is_not_to_be_probed_report_nothing():
    assert await reports(ScriptedEngine({"w": (1,)}), 0, 1) == []
    assert await reports(engine := Engine(), 0, 1, probing="never") == []
    assert engine.asked == 0


async def test_a_newer_version_ends_the_probe_of_the_one_before():
    engine = Engine(SCORES)
    engine.may.clear()
    broadcaster = Broadcaster(1.0, 1)
    await scored(broadcaster, 0, 1)
    prober = Prober("engine-0", engine, broadcaster, "always")
    for version in (0, 1):
        prober.begin(version)
        for _ in range(20):
            await asyncio.sleep(0)
    engine.may.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert [report.version for report in (await broadcaster.probes())[2:]] == [1]
    assert await broadcaster.probes() == []
