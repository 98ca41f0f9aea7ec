"""The order in which learner and engines start."""

import asyncio
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from deploy.run import Run
from tests.deploy.driver.contexts import make_terminal


class Starting:
    """A process whose start takes some turns of the loop; records when it begins and ends."""

    def __init__(self, name, events):
        self.name, self.events, self.answer = name, events, True
        self.turns = 3

    async def start(self):
        self.events.append(f"{self.name} begins")
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.events.append(f"{self.name} ends")
        return self.answer


class Started(Run):
    """A run of processes that do nothing but start."""

    def __init__(self, *settings):
        self.events = []
        self.context = SimpleNamespace(
            config=load_recipe("gsm8k_qwen_1gpu", ["actors.count=2", *settings]),
            console=make_terminal(),
            inputs=SimpleNamespace(model_path="model"),
        )
        self.exporter = None
        self.processes = SimpleNamespace(
            fleet=SimpleNamespace(
                active=[Starting(f"actor-{index}", self.events) for index in range(2)]
            ),
            learner=Starting("learner", self.events),
            services=[
                Starting(name, self.events) for name in ("broker", "broadcaster", "reward-model")
            ],
            handles=dict,
        )


@pytest.mark.parametrize("shares", [[], ["learner.gpus=1"], ["actors.gpus=1"]])
def test_on_a_shared_gpu_one_starts_after_the_other_and_the_engines_first(shares):
    run = Started(*shares)
    asyncio.run(run.start())
    names = ("broker", "broadcaster", "actor-0", "actor-1", "learner", "reward-model")
    assert run.events == [f"{name} {event}" for name in names for event in ("begins", "ends")]
    assert run.starting == {"the run"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_elsewhere_all_start_at_once(gpus):
    run = Started(f"learner.gpus={gpus}", f"actors.gpus={gpus}")
    asyncio.run(run.start())
    assert [event.split()[1] for event in run.events] == ["begins"] * 6 + ["ends"] * 6


def test_those_that_wait_for_their_turn_are_named_with_the_one_that_does_not_start():
    run = Started("deploy.start_timeout_seconds=0.2")
    run.processes.fleet.active[1].turns = 10**9
    with pytest.raises(RunFailed, match=r"^actor-1, learner, reward-model did not start within"):
        asyncio.run(run.start())


def test_an_engine_that_was_given_up_lets_the_next_one_start():
    run = Started()
    run.processes.fleet.active[0].answer = False
    asyncio.run(run.start())
    printed = run.context.console.console.file.getvalue()
    assert "actor-1 is ready" in printed
    assert "actor-0 is ready" not in printed
