"""The contract under the reward `reward_model`: models in this process, and over Ray."""

import asyncio
import math
import os
import signal
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError
from reward_model_folders import CONTEXT, build_classifier

from actors import ray_reward_model
from actors.config import RewardModelConfig
from actors.environments.protocol import Message
from actors.environments.single_turn import conversation
from actors.errors import PromptRefused, RewardFailed, RewardModelLost, RolloutFailed
from actors.ray_reward_model import RewardModelClient, RewardModelProcess, create_reward_model
from actors.reward_models.scoring import load_reward_models
from actors.rewards.rewards import load_rewards
from queues.records import REWARD_MODEL_LOST, Prompt
from tests.waiting import reached

CONFIG = RewardModelConfig(batch_size=4, max_wait_ms=2.0)
TEXTS = [(f"{i}+{i}=", "1" * (i % 7)) for i in range(30)]


async def everybody_gets_the_score_of_his_own_text(scorer):
    together = await asyncio.gather(*(scorer.score(*text) for text in TEXTS))
    alone = [await scorer.score(*text) for text in TEXTS[:5]]
    assert together[:5] == pytest.approx(alone, abs=1e-5)
    assert all(isinstance(score, float) and math.isfinite(score) for score in together)
    assert len({round(score, 4) for score in together}) > 20


async def a_text_that_cannot_be_read_is_refused_alone(scorer):
    fine, foreign, long = await asyncio.gather(
        scorer.score("1+1=", "2"),
        scorer.score("1€1=", "2"),
        scorer.score("1+1=", "2" * CONTEXT),
        return_exceptions=True,
    )
    assert isinstance(fine, float)
    assert isinstance(foreign, PromptRefused)
    assert "'€'" in str(foreign)
    assert isinstance(long, PromptRefused)
    assert f"{CONTEXT + 5} tokens, must have at most {CONTEXT}" in str(long)


async def a_text_that_fills_the_context_is_scored_though_it_cannot_be_closed(scorer):
    prompt = "1+1="
    full, closed = [await scorer.score(prompt, "2" * (CONTEXT - n)) for n in (4, 5)]
    assert math.isfinite(full)
    assert full != closed
    with pytest.raises(PromptRefused):
        await scorer.score(prompt, "2" * (CONTEXT - 3))


async def it_is_one_reward_among_others(scorer):
    rewards = load_rewards(["exact_match", "reward_model"], reward_model_client=scorer)
    prompt = Prompt(prompt_id="a/0/0", text="1+1=", answer="2")
    score = await rewards.score(prompt, "2")
    learned = await scorer.score("1+1=", "2")
    assert score.parts == pytest.approx({"exact_match": 1.0, "reward_model": learned}, abs=1e-5)
    assert score.total == pytest.approx(1.0 + learned, abs=1e-5)
    with pytest.raises(RewardFailed, match=r"'reward_model' of prompt 'a/0/0'.*€"):
        await rewards.score(prompt, "€")


CONTRACT = [
    everybody_gets_the_score_of_his_own_text,
    a_text_that_cannot_be_read_is_refused_alone,
    a_text_that_fills_the_context_is_scored_though_it_cannot_be_closed,
    it_is_one_reward_among_others,
]


@pytest.fixture
def paths(tmp_path):
    """Provide the folders of two reward models."""
    return [build_classifier(tmp_path / str(seed), seed=seed) for seed in (0, 1)]


@pytest.mark.parametrize("scenario", CONTRACT)
def test_a_scorer_keeps_the_contract(scenario, paths):
    asyncio.run(asyncio.wait_for(scenario(load_reward_models(paths, CONFIG)), 120))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
async def test_a_scorer_in_a_process_of_its_own_keeps_the_contract(paths):
    async with asyncio.timeout(120):
        process = RewardModelProcess(lambda: create_reward_model(paths, CONFIG))
        await process.start()
        for part in CONTRACT:
            await part(RewardModelClient(timeout=60.0))
        process.stop()


class Gone:
    """A process of reward models that has died by other causes than Ray's usual one."""

    def __init__(self, error):
        self.score, self.asked, self._error = self, 0, error

    async def remote(self, prompt, completion):
        self.asked += 1
        while self.asked < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        raise self._error


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "ActorUnschedulableError"])
async def test_however_the_process_died_all_look_for_the_next_one_together(monkeypatch, kind):
    works = SimpleNamespace(score=SimpleNamespace(remote=lambda *_: asyncio.sleep(0, 2.0)))
    gone = Gone(getattr(ray.exceptions, kind)("it is gone"))
    answers = [gone, ValueError("there is none"), works]
    looks = []

    def find(name):
        looks.append(name)
        answer = answers[len(looks) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get_actor", find)
    monkeypatch.setattr(ray_reward_model, "LOOK_SECONDS", 0.01)

    client = RewardModelClient(timeout=10.0)
    assert (await asyncio.gather(*(client.score("1", "2") for _ in range(5)))) == [2.0] * 5
    assert (gone.asked, looks) == (5, ["reward-model"] * 3)


def test_without_a_judge_the_reward_fails_and_is_no_zero():
    rewards = load_rewards(["reward_model"])
    with pytest.raises(RewardFailed, match="no reward model was started"):
        asyncio.run(rewards.score(Prompt(prompt_id="a/0/0", text="1"), "2"))


class Judge:
    """A judge that notes what it is asked, and gives an answer: an error, None for never."""

    def __init__(self, answer):
        self.answer = answer

    async def score(self, *asked):
        self.asked = asked
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or await asyncio.Event().wait()


def test_a_judge_reads_the_messages_of_a_prompt_as_the_policy_does():
    judge, messages = Judge(1.0), [Message("system", "s"), Message("user", "u")]
    rewards = load_rewards(["reward_model"], reward_model_client=judge)
    prompt = Prompt(prompt_id="a/0/0", text="s\n\nu", metadata=conversation(messages))
    asyncio.run(rewards.score(prompt, "2"))
    assert judge.asked == (messages, "2")


@pytest.mark.parametrize("answer", [None, RewardModelLost("it is gone")])
def test_a_judge_that_does_not_answer_is_no_fault_of_the_group(answer):
    rewards = load_rewards(["reward_model"], timeout=0.05, reward_model_client=Judge(answer))
    with pytest.raises(RolloutFailed, match="'reward_model' of prompt 'a/0/0'") as caught:
        asyncio.run(rewards.score(Prompt(prompt_id="a/0/0", text="1"), "2"))
    assert caught.value.reason == REWARD_MODEL_LOST


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_is_created_anew_and_lost_scores_are_asked_again(
    tmp_path, number
):
    paths = [build_classifier(tmp_path / "0")]
    config = RewardModelConfig(max_wait_ms=5000.0)
    has_room, looks = True, 0

    def create():
        nonlocal looks
        looks += 1
        return create_reward_model(paths, config) if has_room else None

    async def scenario():
        nonlocal has_room
        process = RewardModelProcess(create)
        await process.start()
        client = RewardModelClient(timeout=90.0)
        expected = await client.score("1+1=", "2")
        first = process.handle
        watching = asyncio.create_task(process.live())
        asked = asyncio.create_task(client.score("1+1=", "2"))
        pid = await first.__ray_call__.remote(lambda _: os.getpid())
        await process.ping()
        assert not asked.done(), "it waits for others to come"
        os.kill(pid, number)
        with pytest.raises((TimeoutError, RayActorError)):
            await asyncio.wait_for(process.ping(), 1.0)
        has_room = False
        again = asyncio.create_task(process.start(again=True))
        with pytest.raises(RayActorError):
            await watching
        await reached(lambda: looks >= 3)
        assert (asked.done(), again.done()) == (False, False)
        has_room = True
        await again
        assert process.handle != first
        assert await asked == pytest.approx(expected, abs=1e-5)
        process.stop()
        with pytest.raises(RewardModelLost, match="reward-model gave no score within 1 s"):
            await RewardModelClient(timeout=1.0).score("1+1=", "2")

    asyncio.run(asyncio.wait_for(scenario(), 120))
