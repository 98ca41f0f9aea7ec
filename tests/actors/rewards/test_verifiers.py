"""The rewards that ship with Headway, on right, wrong and malformed completions."""

import asyncio
import random

import pytest

from actors.errors import RewardFailed
from actors.rewards.answers import edits
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import load_rewards
from actors.shipped import REWARDS
from actors.sources.load_source import load_source
from queues.records import FinishReason, Prompt

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "multipleOf": 0.5}, "s": {"pattern": "^a+$"}},
    "required": ["n"],
}
OPTIONS = {"regex": {"pattern": r"\\boxed\{(?P<answer>[^}]*)\}"}, "json_schema": {"schema": SCHEMA}}


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(processes=1)
    yield pool
    pool.close()


def score(pool, name, completion, *, answer="7", reason=FinishReason.STOP, **options):
    options = options or OPTIONS.get(name, {})
    rewards = load_rewards([name], pool=pool, options={name: options})
    prompt = Prompt(prompt_id="sums/0/1", text="3+4=", answer=answer)
    return asyncio.run(rewards.score(prompt, completion, reason)).total


SCORES = {
    "exact_match": [(" 7\n", 1.0), ("=7", 0.0)],
    "last_answer": [
        ("b3+4=7", 1.0), ("=4,=7 ", 1.0), ("=7,=4", 0.0), ("7", 0.0), ("=", 0.0),
    ],
    # the last numbers, exactly
    "numeric_match": [
        ("so it is 7", 1.0), ("so it is 7.", 1.0), ("7.0", 1.0), ("14/2", 1.0), ("-7", 0.0),
        ("10-7", 1.0), ("7 or 8", 0.0), ("1/0", 0.0), ("seven", 0.0), ("", 0.0),
        ("9" * 2000, 0.0), ("1e999999999", 0.0), ("x7", 0.0),
        ("1,234,567", 1.0, "1234567"), ("costs $1,234.50", 1.0, "1234.5"),
        ("6.02e23", 1.0, "602e21"), (".5", 1.0, "1/2"),
    ],
    # in their order, once and alone
    "tags": [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think></think>\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0), ("<think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0), ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
    ],
    # the group `answer` of the last match
    "regex": [
        ("\\boxed{ 7 }", 1.0), ("\\boxed{7}\\boxed{8}", 0.0), ("\\boxed{8}\\boxed{7}", 1.0),
        ("7", 0.0),
    ],
    "json_schema": [
        ('{"n": 3}', 1.0), ('{"n": 3.5}', 0.0), ('{"n": NaN}', 0.0), ('{"n": 3, "s": "b"}', 0.0),
        ('Here:\n```json\n{"n": 3}\n```\nDone.', 1.0),
        ('```\n{"n": 3}\n```\n```\n{}\n```', 0.0), ("[" * 100_000, 0.0),
        ('{"n": 1' + "0" * 5000 + "}", 0.0), ("", 0.0),
    ],
    "similarity": [(" 1234 ", 0.75, "1235"), ("", 0.0, "a"), ("abc", 0.0, "xyz")],
    "math_verify": [
        ("so it is $\\frac{14}{2}$", 1.0), ("the answer is 7.0", 1.0), ("8", 0.0), ("", 0.0),
    ],
}  # fmt: skip
"""Completions with their scores by each reward, and the answer where it is not 7."""


@pytest.mark.parametrize(
    ("name", "completion", "expected", "answer"),
    [(name, *(*case, "7")[:3]) for name, cases in SCORES.items() for case in cases],
)
def test_a_shipped_reward_tells_right_from_wrong(pool, name, completion, expected, answer):
    assert score(pool, name, completion, answer=answer) == expected


def test_numeric_match_takes_tolerances_and_only_ended_answers(pool):
    assert score(pool, "numeric_match", "0.333", answer="1/3", tolerance=0.001) == 1.0
    assert score(pool, "numeric_match", "0.33", answer="1/3", tolerance=0.001) == 0.0
    assert score(pool, "numeric_match", "101", answer="100", relative_tolerance=0.01) == 1.0
    assert score(pool, "numeric_match", "7", reason=FinishReason.LENGTH) == 0.0
    with pytest.raises(RewardFailed, match="no number in the answer 'seven'"):
        score(pool, "numeric_match", "7", answer="seven")


def test_a_pattern_without_such_a_group_need_only_be_found(pool):
    assert score(pool, "regex", "one\ntwo", pattern="one.two") == 1.0
    assert score(pool, "regex", "two", pattern="one.two") == 0.0


def test_a_text_that_takes_a_pattern_ages_scores_0_instead_of_blocking(pool, caplog):
    assert score(pool, "regex", "a" * 60, pattern="(a+)+b") == 0.0
    assert "took more than its processor time, 2 s" in caplog.text


@pytest.mark.parametrize(
    ("schema", "message"),
    [({"type": "thing"}, "not a JSON Schema"), ({"$ref": "http://localhost/x.json"}, "x.json")],
)
def test_a_schema_that_is_none_or_lies_elsewhere_is_a_failure(pool, schema, message):
    with pytest.raises(RewardFailed, match=message):
        score(pool, "json_schema", "{}", schema=schema)


def test_edits_equal_those_of_the_table():
    random_ = random.Random(0)
    for _ in range(300):
        one, other = ("".join(random_.choices("abc", k=random_.randrange(12))) for _ in range(2))
        row = list(range(len(other) + 1))
        for i, a in enumerate(one, 1):
            previous, row[0] = row[0], i
            for j, b in enumerate(other, 1):
                previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
        assert edits(one, other) == row[-1]


def malformed(count):
    """Texts that no well-meaning policy writes, the same in every run."""
    random_ = random.Random(7)
    pieces = [
        "\\boxed{", "}", "\\frac{1}{", "$", "{", "[", '"', "\x00", "\ud800", "\u202e", "```",
        "```json\n",
        "<answer>", "</answer>", "<think>", "=", "1e999", "9" * 400, "-" * 50, "(" * 200, "\\", "%",
        "\n", "∞", "𝟙", "NaN", "None", "__import__('os')", "/0", "1,2,3", "\\sqrt[", "^", "7",
    ]  # fmt: skip
    return ["".join(random_.choices(pieces, k=random_.randrange(1, 30))) for _ in range(count)]


def gym_prompts():
    tasks = ["chain_sum", "countdown", "knights_knaves", "arc_1d", "rearc", "simple_equations",
             "polynomial_equations", "sudoku", "graph_color", "word_ladder", "letter_jumble",
             "tower_of_hanoi", "rush_hour"]  # fmt: skip
    return [load_source(f"reasoning_gym:{task}", options={}, seed=3).next(1)[0] for task in tasks]


OTHERS = {"code", "reward_model", "llm_judge", "pairwise_judge"}


@pytest.mark.parametrize("name", sorted({*REWARDS} - OTHERS))
def test_malformed_completions_are_scored_and_never_right(pool, name):
    answer = r"\frac{31}{14}" if name == "math_verify" else "fourteen halves and 31"
    prompt = Prompt(prompt_id="sums/0/1", text="3+4=", answer=answer)
    prompts = gym_prompts() if name == "reasoning_gym" else [prompt]
    rewards = load_rewards([name], pool=pool, options={name: OPTIONS.get(name, {})})

    async def everything():
        return [
            await rewards.score(prompts[place % len(prompts)], text)
            for place, text in enumerate(malformed(100))
        ]

    for result in asyncio.run(everything()):
        assert 0.0 <= result.total < 1.0


def test_rewards_weigh_what_is_recorded_without_weights(pool):
    rewards = load_rewards(["exact_match", "similarity"], pool=pool, weights={"similarity": 0.5})
    result = asyncio.run(rewards.score(Prompt(prompt_id="a/0/0", text="?", answer="1234"), "1235"))
    assert result == (0.375, {"exact_match": 0.0, "similarity": 0.75}, ())
