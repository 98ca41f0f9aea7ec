"""Rewards of a whole group: their forms, their place in a rollout, and the judge of pairs."""

import asyncio
import json
import sys
import textwrap
from contextlib import closing
from dataclasses import replace

import pytest

from actors.bounded_http import Answer
from actors.config import GoldConfig
from actors.environments.protocol import Message, Turn
from actors.errors import RewardFailed
from actors.rewards import llm_judge
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import load_rewards
from deploy.config.loader import load_recipe
from deploy.preflight.inputs import check_scoring
from headway.errors import InputError
from queues.records import FinishReason, Prompt
from tests.actors.fakes import SAMPLING, Recited, episodes, lease

PROMPT = Prompt(prompt_id="p/0/1", text="1+1=", answer="2", metadata={"k": 3})
ENDS = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
MODULE = """
    from actors.rewards.find_reward import group_reward

    @group_reward
    def rare(prompt, completions, answer, metadata, *, factor=1.0):
        return [factor / completions.count(text) for text in completions]

    @group_reward
    async def told(prompt, completions, answer, metadata):
        cut = metadata["headway:finish_reason"]
        return [{"right": t == answer, "cut": c == "length"} for t, c in zip(completions, cut)]

    @group_reward
    def broken(prompt, completions, answer, metadata, *, returned):
        return returned

    @group_reward
    def alone(prompt, completion):
        return [0.0]
"""


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory):
    """Have a module `own_group`, and a pool whose processes find it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_group.py").write_text(textwrap.dedent(MODULE))
    sys.path.insert(0, str(folder))
    pool = RewardPool(processes=1)
    with closing(pool):
        yield pool
    sys.path.remove(str(folder))


def score(pool, names, **settings):
    rewards = load_rewards(names, pool=pool, **settings)
    return asyncio.run(rewards.score_group(PROMPT, ["2", "3", "2"], ENDS))


def test_a_function_or_coroutine_scores_all_of_a_group_with_options_and_weights(own):
    scores = score(
        own, ["exact_match", "own_group:rare", "own_group:told"],
        options={"own_group:rare": {"factor": 2.0}}, weights={"own_group:told": 10.0},
    )  # fmt: skip
    told = "own_group:told"
    assert [score[:2] for score in scores] == [
        (11.0, {"own_group:rare": 1.0, f"{told}/right": 1.0, f"{told}/cut": 0.0}),
        (12.0, {"own_group:rare": 2.0, f"{told}/right": 0.0, f"{told}/cut": 1.0}),
        (11.0, {"own_group:rare": 1.0, f"{told}/right": 1.0, f"{told}/cut": 0.0}),
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "returned 1.0 for 3 completions, must be a list of one score for each"),
        ([1.0, 2.0], "for 3 completions"),
        ([], "for 3 completions"),
        ({"a": 1, "b": 2, "c": 3}, "for 3 completions"),
        ("123", "for 3 completions"),
        (None, "returned None for 3"),
        ([1.0, float("nan"), 2.0], "returned nan"),
        ([1.0, {"a": "b"}, 2.0], "returned 'b'"),
    ],
)
def test_whatever_is_no_score_for_each_fails_the_group(own, returned, message):
    with pytest.raises(RewardFailed, match=message):
        score(own, ["own_group:broken"], options={"own_group:broken": {"returned": returned}})


def test_a_function_of_other_inputs_is_refused():
    with pytest.raises(
        InputError, match=r"\(prompt, completion\), but is called with .*completions"
    ):
        load_rewards(["own_group:alone"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heldout_reward": None}, "heldout_reward = actors.reward has 'own_group:rare'"),
        ({"heldout_reward": ("own_group:rare",)}, "heldout_reward has 'own_group:rare'"),
        ({"gold": GoldConfig(reward=["own_group:rare"])}, "gold.reward has 'own_group:rare'"),
        ({}, "'own_group:rare' compares .* prompts.group_size = 1; give 2"),
    ],
)
def test_it_is_refused_where_rollouts_are_scored_one_by_one(settings, message):
    config = load_recipe("demo", ["actors.reward=['own_group:rare']"])
    actors = config.actors.model_copy(update=settings)
    prompts = config.prompts.model_copy(update={"group_size": 1})
    with pytest.raises(InputError, match=message):
        check_scoring(config.model_copy(update={"actors": actors, "prompts": prompts}))


class Asks:
    """An environment that answers the policy so many times."""

    def __init__(self, answers):
        self.answers = answers

    def reset(self, prompt):
        return [Message("user", prompt.text)]

    def step(self, message):
        self.answers -= 1
        return Turn([Message("tool", "+")], None, self.answers < 0)


@pytest.mark.parametrize("answers", [0, 1])
async def test_it_is_added_to_finished_rollouts_by_their_last_messages(own, answers):
    runner = episodes(None, SAMPLING, new_environment=lambda: Asks(answers))
    runner.rewards = load_rewards(["last_answer", "own_group:rare"], pool=own)
    played = []
    for last in ("3", "4", "3"):
        runner.engine = Recited(*[str(len(played))] * answers, last)
        played.append(await runner.run(lease(size=3), len(played)))
    late = replace(played[0], finish_reason=FinishReason.TIMEOUT, reward=-1.0, reward_parts={})
    scored = await runner.score_group(lease(size=3), [*played, late])
    gains = [new.reward - old.reward for new, old in zip(scored, [*played, late], strict=True)]
    assert gains == [0.5, 1.0, 0.5, 0.0]
    assert [r.reward_parts.get("own_group:rare") for r in scored] == [0.5, 1.0, 0.5, None]


@pytest.mark.parametrize(
    ("prefers", "rewards"),
    [
        (lambda first, second: max(first, second), [0.0, 1.0, 0.5]),
        (lambda first, second: first, [0.5, 0.5, 0.5]),
        (lambda first, second: second, [0.5, 0.5, 0.5]),
        (lambda first, second: None, [0.5, 0.5, 0.5]),
        (lambda first, second: first if "c" in (first, second) else max(first, second),
         [0.25, 0.75, 0.5]),
    ],
    ids=["consistent", "first", "second", "draws", "at times"],
)  # fmt: skip
def test_a_judge_of_pairs_is_asked_both_ways_and_pays_the_share_of_wins(
    monkeypatch, prefers, rewards
):
    asked = []

    async def answer(client, url, *, json: dict, **_):
        text = json["messages"][0]["content"]
        first, second = (text.split(f"{n} answer:\n")[1][0] for n in ("First", "Second"))
        asked.append((first, second))
        choice = {None: "5", first: "10", second: "0"}[prefers(first, second)]
        return Answer(200, {}, dumped(choice))

    monkeypatch.setattr(llm_judge, "ask", answer)
    options = {"url": "http://judge/v1", "model": "m"}
    loaded = load_rewards(["pairwise_judge"], options={"pairwise_judge": options})
    scores = asyncio.run(loaded.score_group(PROMPT, ["a", "d", "c"], ENDS))
    assert [score.total for score in scores] == rewards
    assert sorted(asked) == [(x, y) for x in "acd" for y in "acd" if x != y]


def dumped(reply):
    return json.dumps({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]})


def test_a_comparison_that_fails_ends_those_that_wait(monkeypatch):
    asked = []

    async def refuse(*_, **__):
        asked.append(1)
        await asyncio.sleep(0)
        return Answer(401, {}, "no key")

    monkeypatch.setattr(llm_judge, "ask", refuse)
    options = {"url": "http://judge/v1", "model": "m", "at_once": 1}
    loaded = load_rewards(["pairwise_judge"], options={"pairwise_judge": options})
    with pytest.raises(RewardFailed, match=r"'pairwise_judge' of prompt 'p/0/1' .* answered 401"):
        asyncio.run(loaded.score_group(PROMPT, ["a", "b", "c"], ENDS))
    assert len(asked) <= 2  # another may have its turn before it is ended
