"""Which evaluations a run makes."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from actors.config import HeldoutConfig
from deploy.config.evaluation_schedule import PlannedEvaluation, evaluator, plan, purpose
from deploy.driver.evaluations import collect, initial, queue_all
from deploy.driver.run_metrics import RunMetrics
from queues.records import Evaluation, Prompt, Purpose
from tests.deploy.driver.contexts import make_context, output


@pytest.mark.parametrize(
    ("heldout", "steps", "expected"),
    [
        ({"final_size": 200, "sampled": True}, 25, [(0, 200), (10, 50), (20, 50), (25, 200)]),
        ({"sampled": False}, 10, [(0, 50), (10, 50)]),
    ],
)
def test_both_ends_are_larger_and_every_version_is_scored_once_in_each_way(
    heldout, steps, expected
):
    planned = plan(HeldoutConfig(size=50, every=10, **heldout), steps=steps, temperature=0.8)
    ways = [("greedy", 0.0), ("sampled", 0.8)][: 1 + heldout["sampled"]]
    assert [(p.version, p.kind, p.temperature, p.size) for p in planned] == [
        (version, *way, size) for version, size in expected for way in ways
    ]
    assert len({p.name for p in planned}) == len(planned)


class Feed:
    """Writes down what is queued."""

    def __init__(self):
        self.queued = {}

    async def evaluate(self, name, prompts, *, temperature, min_version):
        self.queued[name] = ([prompt.prompt_id for prompt in prompts], temperature, min_version)


def test_each_problem_is_sampled_as_often_as_asked_for_and_greedily_once():
    config = HeldoutConfig(size=2, every=10, sampled=True, samples=3)
    planned = plan(config, steps=10, temperature=0.8)
    prompts = [Prompt(prompt_id=name, text=name) for name in "abc"]
    feed = Feed()
    asyncio.run(queue_all(feed, planned, prompts))
    assert feed.queued == {
        "greedy@0": (["a", "b"], 0.0, 0),
        "sampled@0": (["a", "b"] * 3, 0.8, 0),
        "greedy@10": (["a", "b"], 0.0, 10),
        "sampled@10": (["a", "b"] * 3, 0.8, 10),
    }


def test_a_pinned_evaluation_has_the_first_actor_to_itself_and_else_all_do_everything():
    pinned = HeldoutConfig(pinned=True)
    purposes = [purpose(pinned, index) for index in range(3)]
    assert purposes == [Purpose.EVALUATE, Purpose.TRAIN, Purpose.TRAIN]
    for config in (HeldoutConfig(), None):
        assert [purpose(config, index) for index in range(2)] == [None, None]


class Scored:
    """A broker whose only evaluation has failed in nine of ten rollouts."""

    def __init__(self, newest=0):
        self.newest = newest

    async def evaluation(self, name, *, timeout):
        return Evaluation(
            count=10, failed=9, score=1.0, best=None, incomplete=9, lowest_version=0,
            highest_version=self.newest,
        )  # fmt: skip

    async def status(self, after):
        return SimpleNamespace(last_error="reward: raised KeyError('[x]')\n  File task.py, line 3")


def test_a_score_is_shown_and_measured_with_its_failures_and_the_latest_of_them(tmp_path):
    context = make_context(tmp_path)
    planned = [PlannedEvaluation(version=0, kind="greedy", temperature=0.0, size=10)]
    context = replace(context, inputs=SimpleNamespace(prompts=SimpleNamespace(evaluations=planned)))
    logged = []
    trackers = SimpleNamespace(scores=lambda version, scores: logged.append((version, scores)))
    asyncio.run(collect(context, Scored(), trackers))
    shown = output(context)
    assert "held-out at version 0: greedy 1.000 (1 of 10, 9 failed)\n" in shown
    assert "reward: raised KeyError('[x]')\n  File task.py, line 3\n" in shown
    assert logged == [(0, {"greedy": 1.0, "greedy/failed": 9.0})]
    registry = CollectorRegistry()
    registry.register(RunMetrics(context.record, tmp_path, list))
    assert registry.get_sample_value("headway_heldout_failed", {"kind": "greedy"}) == 9


@pytest.mark.parametrize(("pinned", "newest"), [(True, 3), (True, 0), (False, 3)])
def test_a_pinned_score_of_several_versions_is_said(tmp_path, pinned, newest):
    context = make_context(tmp_path)
    context.config.heldout = HeldoutConfig(pinned=pinned)
    planned = [PlannedEvaluation(version=0, kind="greedy", temperature=0.0, size=10)]
    context = replace(context, inputs=SimpleNamespace(prompts=SimpleNamespace(evaluations=planned)))
    asyncio.run(collect(context, Scored(newest), SimpleNamespace(scores=lambda *_: None)))
    said = "it is sampled by versions 0 to 3 though heldout.pinned = true" in output(context)
    assert said == (pinned and newest > 0)


class Watched:
    """A broker whose engines come one by one, with the evaluations that are never finished."""

    def __init__(self, *unfinished):
        self.unfinished, self.looks = unfinished, 0

    async def status(self):
        self.looks += 1
        engines = {f"engine-{index}": 0 for index in range(self.looks - 1)}
        return SimpleNamespace(evaluations=self.unfinished, engines=engines)


@pytest.mark.parametrize(
    ("unfinished", "looks"), [(("greedy@0", "greedy@10"), 2), (("greedy@10",), 1)]
)
def test_training_waits_until_the_evaluator_has_the_first_version_and_not_for_its_score(
    unfinished, looks
):
    config = HeldoutConfig(size=2, every=10, pinned=True)
    broker = Watched(*unfinished)
    planned = plan(config, steps=10, temperature=1.0)
    asyncio.run(asyncio.wait_for(initial(broker, planned, evaluator(config), poll_seconds=0.0), 10))
    assert broker.looks == looks
