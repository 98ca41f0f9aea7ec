"""The gold reward: on which prompts, and that it changes no reward and fails no rollout."""

import asyncio
import dataclasses

import pytest

from actors.assembly import build_rewards
from actors.config import ActorsConfig
from actors.errors import RewardFailed
from actors.rewards.gold import GoldReward
from actors.rewards.rewards import Rewards, load_rewards
from queues.records import GOLD, FinishReason, Purpose
from tests.actors.fakes import POOL, Recited, lease, play


def gold(share=1.0, *names):
    return GoldReward(load_rewards(names or ("exact_match",), pool=POOL), share)


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_a_share_of_the_prompts_has_a_gold_reward_in_every_epoch(share):
    covered = [index for index in range(4000) if gold(share).covers(f"sums/0/{index}")]
    assert len(covered) == pytest.approx(4000 * share, rel=0.15)
    assert covered == [index for index in range(4000) if gold(share).covers(f"sums/7/{index}")]
    assert all(gold(1.0).covers(f"sums/0/{index}") for index in covered)


async def broken(arguments):
    raise RewardFailed("was not reached")


@pytest.mark.parametrize(
    ("watching", "parts"),
    [
        (gold(1.0), {GOLD: 0.0}),
        (gold(1.0, "last_answer", "exact_match"), {GOLD: 1.0}),
        (gold(1e-9), {}),
        (GoldReward(Rewards({"broken": broken}, {}), 1.0), {}),
        (None, {}),
    ],
)
def test_a_gold_reward_is_recorded_and_changes_no_reward(watching, parts):
    rollout = play(Recited("3+4=7"), gold=watching)
    assert (rollout.reward, rollout.task_reward) == (1.0, 1.0)
    assert rollout.reward_parts == {"last_answer": 1.0, **parts}


def test_evaluations_have_no_gold_reward():
    of = dataclasses.replace(lease(), purpose=Purpose.EVALUATE)
    assert GOLD not in play(Recited("=7"), of=of, gold=gold(1.0)).reward_parts


def test_a_gold_reward_is_loaded_with_the_options_and_weights_of_its_name():
    config = ActorsConfig(
        reward=["last_answer"],
        reward_weights={"exact_match": 3.0},
        gold={"reward": ["exact_match"], "share": 0.5},
    )
    *_, watching = build_rewards(config, pool=POOL, reward_model_client=None)
    assert (watching.share, config.gold.on_hacking) == (0.5, "warn")
    prompt = lease(prompt_id="sums/0/3").prompt
    assert watching.covers(prompt.prompt_id)
    assert asyncio.run(watching.parts(prompt, "7", FinishReason.STOP)) == {GOLD: 3.0}
