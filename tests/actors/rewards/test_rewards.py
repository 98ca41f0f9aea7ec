"""Rewards by name, added up; and that what goes wrong is never a zero."""

import asyncio
from dataclasses import replace
from decimal import Decimal

import pytest
from fakes import POOL

from actors.errors import RewardFailed
from actors.rewards.find_reward import NoNumber, StepParts, StepScore, parts_of, score_of
from actors.rewards.rewards import check_scorable, load_rewards
from actors.sources.load_source import load_source
from headway.errors import InputError
from queues.records import FinishReason, Prompt
from tests.red_team.cases import EVALUATED

SUM = Prompt(prompt_id="sums/0/1", text="3+4=", answer="7")


TEXTS = ("exact_match", "last_answer", "similarity", "regex")
"""Rewards that compare texts."""


def score(names, completion, *, prompt=SUM, reason=FinishReason.STOP, options=None):
    rewards = load_rewards(names, timeout=60.0, pool=POOL, options=options)
    return asyncio.run(rewards.score(prompt, completion, reason))


@pytest.mark.parametrize("name", ["exact_match", "last_answer"])
def test_an_answer_that_was_cut_off_does_not_count(name):
    completion = "7" if name == "exact_match" else "=7"
    assert score([name], completion, reason=FinishReason.LENGTH) == (0.0, {name: 0.0}, ())


@pytest.mark.parametrize("task", ["chain_sum", "arc_1d", "knights_knaves", "rearc", *EVALUATED])
def test_reasoning_gym_verifies_what_its_source_posed(task):
    prompt = load_source(f"reasoning_gym:{task}", options={}, seed=3).next(4)[-1]
    assert score(["reasoning_gym"], prompt.answer, prompt=prompt).total == 1.0
    tagged = f"hm <answer>{prompt.answer}</answer>"
    assert score(["reasoning_gym"], tagged, prompt=prompt).total == 1.0
    assert score(["reasoning_gym"], "no idea", prompt=prompt).total < 0.5


def test_rewards_add_up_and_each_part_has_its_name():
    own = ("patient", "delegates", "several", "length")
    assert score(["exact_match", *(f"user_module:{name}" for name in own)], "7") == (
        1.0 + 0.25 + 0.25 + 1.5 + 1.0,
        {
            "exact_match": 1.0,
            "user_module:patient": 0.25,
            "user_module:delegates": 0.25,
            "user_module:several/form": 0.5,
            "user_module:several/content": 1.0,
            "user_module:length": 1.0,
        },
        (),
    )


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("user_module:raises", "ZeroDivisionError"),
        ("user_module:stops", "StopIteration"),
        ("user_module:not_a_number", "returned nan"),
        ("user_module:none", "returned None"),
        ("user_module:text", "returned 'good' for 'user_module:text/form'"),
        ("user_module:nothing", "returned {}"),
        ("reasoning_gym", "not from a source reasoning_gym"),
    ],
)
def test_a_reward_without_a_number_fails_and_names_itself_and_the_prompt(reward, message):
    with pytest.raises(RewardFailed, match=message) as caught:
        score([reward], "7")
    assert repr(reward) in str(caught.value)
    assert "'sums/0/1'" in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "answer", "message"),
    [(name, None, "no answer") for name in ("exact_match", "last_answer", "math_verify")]
    + [("math_verify", "", "no expression"), ("numeric_match", "3:4", "no number")]
    + [(name, answer, "an empty answer") for name in TEXTS for answer in ("", " \n\t", "\u3000")],
)
def test_an_answer_that_is_missing_or_cannot_be_read_is_a_failure_not_a_zero(
    reward, answer, message
):
    prompt = Prompt(prompt_id="open/0/0", text="why?", answer=answer)
    options = {"regex": {"pattern": "(?P<answer>.*)"}} if reward == "regex" else {}
    for completion in ("=7", "", "="):
        with pytest.raises(RewardFailed, match=message):
            score([reward], completion, prompt=prompt, options=options)


@pytest.mark.parametrize(
    ("reward", "answer", "message"),
    [(name, None, "'a/0/1' has none") for name in (*TEXTS[:3], "math_verify")]
    + [(name, " ", "'a/0/1' has an empty one") for name in (*TEXTS[:3], "math_verify")],
)
def test_an_answer_that_is_missing_is_refused_before_the_run(reward, answer, message):
    good, bad = (Prompt(prompt_id=f"a/0/{row}", text="?", answer="7") for row in range(2))
    check_scorable([reward], [good])
    with pytest.raises(InputError, match=message):
        check_scorable([reward], [good, replace(bad, answer=answer)])


@pytest.mark.parametrize(
    ("keys", "named"),
    [((1, "1"), "1 and '1'"), (("1", 1), "'1' and 1"), ((True, "True"), "True and 'True'"),
     ((1.0, "1.0"), "1.0 and '1.0'"), ((None, "None"), "None and 'None'"),
     (("a", 2, "b", "2"), "2 and '2'"), ((1, "a", Decimal("1.0"), "1"), "1 and '1'")],
)  # fmt: skip
def test_keys_of_a_reward_that_would_have_one_name_are_refused(keys, named):
    with pytest.raises(NoNumber, match=f"keys {named},"):
        parts_of("mine", dict.fromkeys(keys, 0.5))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_whose_score_is_no_finite_number_is_refused(wrong):
    parts = StepParts({"reward_model": 0.5})
    parts.steps = tuple(StepScore("reward_model", end, s) for end, s in ((3, 0.5), (7, wrong)))
    with pytest.raises(NoNumber, match=f"returned {wrong} for reward_model of the step .* at 7,"):
        score_of("reward_model", "1+1=2, =2", parts)


def test_rewards_see_whether_the_policy_ended_the_completion():
    for reason, expected in ((FinishReason.STOP, 1.0), (FinishReason.LENGTH, 0.0)):
        assert score(["user_module:reason"], "7", reason=reason).total == expected


def test_a_finish_reason_of_the_data_set_is_kept_beside_that_of_the_completion():
    prompt = replace(SUM, metadata={"finish_reason": "length"})
    for reason, expected in ((FinishReason.STOP, 1.0), (FinishReason.LENGTH, 0.0)):
        parts = score(
            ["exact_match", "user_module:reason"], "7", prompt=prompt, reason=reason
        ).parts
        assert parts == {"exact_match": expected, "user_module:reason": 0.0}
