"""Comparisons of two policies: both orders, ties, what fails, and rewards in place of a judge."""

import pytest

from actors.errors import RewardFailed
from actors.rewards.pairwise_judge import load_pair_judge
from deploy.config.loader import load_recipe
from deploy.offline.answer_comparison import Sample, compare
from deploy.report.score_intervals import win_rate
from headway.errors import InputError
from queues.records import Prompt
from tests.deploy.conftest import RECIPE

ONE, TWO = Prompt(prompt_id="1", text="one", answer="1"), Prompt(prompt_id="2", text="two")
SETS = {"a": [ONE], "b": [TWO]}
OURS = {"a": [[Sample(0.0, "OURS"), Sample(1.0, "OURS")]], "b": [[Sample(0.5, "OURS")]]}
THEIRS = {"a": [[Sample(1.0, "x"), Sample(1.0, "y")]], "b": [[Sample(0.0, "z")]]}


@pytest.mark.parametrize(
    ("better", "rate", "agreement"),
    [
        (lambda first, second: 1.0, 0.5, 0.0),  # whatever is first
        (lambda first, second: 0.5, 0.5, 1.0),
        (lambda first, second: float(first == "OURS"), 1.0, 1.0),
        (lambda first, second: float(first != "OURS"), 0.0, 1.0),
    ],
)
def test_a_judge_is_asked_in_both_orders(better, rate, agreement):
    async def judge(prompt, completion, answer, metadata):
        first, _, second = completion.partition("\n\nSecond answer:\n")
        asked.append((prompt, answer, first := first.removeprefix("First answer:\n"), second))
        return better(first, second)

    asked = []
    verdicts = compare(judge, SETS, OURS, THEIRS)
    assert sorted(asked, key=str) == [
        ("one", "1", "OURS", "x"), ("one", "1", "OURS", "y"),
        ("one", "1", "x", "OURS"), ("one", "1", "y", "OURS"),
        ("two", None, "OURS", "z"), ("two", None, "z", "OURS"),
    ]  # fmt: skip
    for name, problems in verdicts.items():
        score = win_rate(problems)
        assert (score["value"], score["agreement"], score["n"]) == (
            rate,
            agreement,
            len(SETS[name]),
        )


def test_without_a_judge_the_higher_reward_is_better():
    verdicts = compare(None, SETS, OURS, THEIRS)
    outcomes = {name: [it.outcome for it in problems[0]] for name, problems in verdicts.items()}
    assert outcomes == {"a": [0.0, 0.5], "b": [1.0]}


def test_the_first_error_of_a_problem_stands_for_its_verdicts():
    async def judge(prompt, completion, answer, metadata):
        if "y" in completion:
            raise failed
        return 1.0

    failed, away = RewardFailed("no mark"), RewardFailed("no sandbox")
    verdicts = compare(judge, SETS, OURS, {**THEIRS, "b": [away]})
    assert verdicts == {"a": [failed], "b": [away]}
    assert compare(judge, SETS, {**OURS, "b": [away]}, THEIRS)["b"] == [away]


def test_the_judge_is_that_of_the_recipe():
    def load_judge(*settings):
        heldout = load_recipe(str(RECIPE), settings).heldout
        return load_pair_judge("heldout.judge", heldout.judge)

    assert load_judge() is None
    judge = load_judge('heldout.judge={ url = "http://localhost:1/v1", model = "m", seconds = 3 }')
    assert (judge.seconds, "if the first answer is better" in judge.instruction) == (3.0, True)
    with pytest.raises(InputError, match=r"heldout\.judge requires the option url"):
        load_judge('heldout.judge={ model = "m" }')
