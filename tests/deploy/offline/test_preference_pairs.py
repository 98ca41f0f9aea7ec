"""`headway pairs`: which answers become pairs, a judge's bias, what goes on, and refusals."""

import json
import os
import re
import signal
from itertools import combinations, islice, pairwise, permutations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.protocol import Message
from actors.sources.examples import load_examples
from actors.sources.preferences import PREFERENCES
from deploy.offline.preference_pairs import Comparison, choose_pairs
from headway.file_lock import locked
from tests.actors.rewards.test_llm_judge import server
from tests.deploy.conftest import RECIPE, REWARD, call_main, read_rows

BY_REWARD = ("pairs.rewards=['paired:score']", "pairs.prompts=5", "pairs.samples=4")
OF_GROUP = """
from actors.rewards.find_reward import group_reward

@group_reward
def of_group(prompt, completions, answer, metadata):
    return [score(prompt, completion, answer, metadata) for completion in completions]
"""
TALK = [{"role": "system", "content": "1+"}, {"role": "user", "content": "2="}]


def by_rewards(rewards):
    """Return the comparisons of every two answers with these rewards."""
    pairs = combinations(range(len(rewards)), 2)
    return [Comparison(one, other, rewards[one] - rewards[other]) for one, other in pairs]


@pytest.mark.parametrize(
    ("comparisons", "margin", "extremes", "adjacent"),
    [
        (by_rewards([0.5, 0.0, 1.0]), 0.0, [(2, 1)], [(2, 0), (0, 1)]),
        (by_rewards([0.5, 0.0, 1.0]), 0.6, [(2, 1)], []),
        (by_rewards([0.0, 0.6, 1.0]), 0.6, [(2, 0)], [(1, 0)]),
        (by_rewards([1.0, 0.0]), 1.0, [(0, 1)], [(0, 1)]),
        (by_rewards([1.0, 0.0]), 1.1, [], []),
        (by_rewards([1.0, 1.0, 0.0]), 0.0, [(0, 2)], [(1, 2)]),
        (by_rewards([1.0, 1.0, 1.0]), 0.0, [], []),
        (by_rewards([1e300, -1e300]), 0.0, [(0, 1)], [(0, 1)]),
        ([], 0.0, [], []),
        # what cannot be compared is in no pair
        ([Comparison(0, 2, -1.0)], 0.0, [(2, 0)], [(2, 0)]),
        # best and worst are not decided: the decided pair of the furthest ranks
        ([Comparison(0, 1, 1), Comparison(1, 2, 1), Comparison(0, 2, 0)], 0.0, [(0, 1)],
         [(0, 1), (1, 2)]),
        # in a circle all ranks are the same
        ([Comparison(0, 1, 1), Comparison(1, 2, 1), Comparison(0, 2, -1)], 0.0, [(0, 1)],
         [(0, 1), (1, 2)]),
    ],
)  # fmt: skip
def test_the_pairs_of_a_prompt(comparisons, margin, extremes, adjacent):
    assert choose_pairs(comparisons, margin=margin, choose="extremes") == extremes
    assert choose_pairs(comparisons, margin=margin, choose="adjacent") == adjacent


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=7), st.floats(0, 5))
def test_by_rewards_the_best_is_paired_with_the_worst_or_each_with_the_next(rewards, margin):
    comparisons = by_rewards(rewards)
    extremes = choose_pairs(comparisons, margin=margin, choose="extremes")
    spread = max(rewards) - min(rewards)
    gaps = [rewards[better] - rewards[worse] for better, worse in extremes]
    assert gaps == ([spread] if spread > 0 and spread >= margin else [])
    adjacent = choose_pairs(comparisons, margin=margin, choose="adjacent")
    steps = [high - low for high, low in pairwise(sorted(rewards, reverse=True))]
    found = [rewards[better] - rewards[worse] for better, worse in adjacent]
    assert found == [step for step in steps if step > 0 and step >= margin]


@given(st.integers(2, 6).flatmap(
    lambda n: st.lists(st.sampled_from([-1.0, 0.0, 1.0, None]), min_size=comb(n, 2),
                       max_size=comb(n, 2)).map(lambda gaps: (n, gaps))
))  # fmt: skip
def test_a_pair_is_one_that_the_judge_has_decided_so(case):
    count, gaps = case
    decided = zip(combinations(range(count), 2), gaps, strict=True)
    comparisons = [Comparison(*pair, gap) for pair, gap in decided if gap is not None]
    gap_of = {(c.one, c.other): c.gap for c in comparisons}
    for choose, most in (("extremes", 1), ("adjacent", count - 1)):
        pairs = choose_pairs(comparisons, margin=0.0, choose=choose)
        assert len(pairs) <= most
        for better, worse in pairs:
            assert gap_of.get((better, worse), -gap_of.get((worse, better), 0.0)) == 1
    assert bool(choose_pairs(comparisons, margin=0.0, choose="extremes")) == any(gap_of.values())


def compared(text):
    """Return the principle and the two answers that a judge is asked about."""
    form = r"compare by:\n(.*)\n\nFirst answer:\n(.*)\n\nSecond answer:\n(.*)\n\nReference:"
    return re.search(form, text, re.DOTALL).groups()


def prefers_longer(text):
    _, first, second = compared(text)
    return "5" if len(first) == len(second) else "10" if len(first) > len(second) else "0"


@pytest.fixture
def pairs(tmp_path, tiny_model):
    """Return a function that makes the pairs of the small recipe with the tiny model."""
    (tmp_path / "paired.py").write_text(REWARD + OF_GROUP)

    def call(*settings, code=0, flags=("--policy", tiny_model)):
        fixed = [part for setting in settings for part in ("--set", setting)]
        result = call_main(["pairs", RECIPE, *flags, *fixed], tmp_path)
        call.said = result.stdout + result.stderr
        assert result.returncode == code, call.said
        report = call.folder / "report.json"
        return json.loads(report.read_text()) if report.exists() else None

    call.folder = tmp_path / "runs/small-pairs"
    return call


def judged_by(url, **options):
    judge = {"url": url, "model": "m", "attempts": 1, **options}
    values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in judge.items())
    return (f"pairs.judge={{ {values} }}", "pairs.prompts=4", "pairs.samples=3")


def test_a_judge_compares_by_principles_and_what_it_prefers_is_read_as_preferences(pairs):
    asked = []

    def reply(text):
        asked.append(compared(text))
        return prefers_longer(text)

    with server(reply_to=reply) as (url, _):
        report = pairs(*judged_by(url), "pairs.principles=['Be long.', 'Say much.']")
    rows = read_rows(pairs.folder / "comparisons.jsonl")
    answers = [row["answers"] for row in rows]
    both = [(a, b) for group in answers for a, b in permutations(group, 2) if a and b and a != b]
    assert sorted((a, b) for _, a, b in asked) == sorted(both)
    assert {principle for principle, *_ in asked} == {"Be long.", "Say much."}
    by_pair = [{p for p, *two in asked if set(two) == {a, b}} for a, b in both]
    assert all(len(principles) == 1 for principles in by_pair), "both orders have one principle"
    assert report["agreement"]["value"] == 1.0
    assert report["first_preferred"]["value"] == 0.5
    assert report["comparisons"] == len(both) / 2
    assert (report["prompts"], report["failed"], report["disagreements"]) == (4, 0, 0)
    assert f"pairs {report['pairs']}" in pairs.said
    file = pairs.folder / "pairs.jsonl"
    examples = load_examples(PREFERENCES, str(file), options={}, seed=0, heldout=frozenset())
    written = {*islice(examples, report["pairs"])}
    expected = {
        (row["prompt"], max(group, key=len), min(group, key=len))
        for row, group in zip(rows, answers, strict=True)
    }
    assert {(p, len(c), len(r)) for p, c, r in written} == {
        (p, len(c), len(r)) for p, c, r in expected if len(c) > len(r)
    }
    pairs(*judged_by(url), "pairs.principles=['Be long.']", code=2)
    assert "pairs.jsonl exists" in pairs.said


def test_a_judge_that_always_prefers_the_first_makes_no_pairs_and_shows_its_bias(pairs):
    with server(reply_to=lambda text: "10") as (url, asked):
        report = pairs(*judged_by(url), "pairs.principles=['Be good.']", code=1)
        calls = len(asked)
        assert pairs(*judged_by(url), "pairs.principles=['Be good.']", code=1) == report
        assert calls == len(asked) == 2 * report["comparisons"]
    assert report["first_preferred"]["value"] == report["first_preferred"]["high"] == 1.0
    assert report["first_preferred"]["low"] < 1
    assert report["agreement"]["value"] == 0.0
    assert (report["pairs"], report["ties"]) == (0, 0)
    assert report["disagreements"] == report["comparisons"] > 0
    assert "no comparison decides" in pairs.said
    assert "position bias" in pairs.said
    assert not (pairs.folder / "pairs.jsonl").exists()


@pytest.mark.parametrize(("ends_by", "code"), [("ctrl-c", 130), ("away", 1)])
def test_what_was_compared_is_not_compared_again(pairs, ends_by, code):
    asked, limit = [], 7

    def reply(text):
        if len(asked) == limit and ends_by == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        asked.append(compared(text)[1:])
        return 503 if len(asked) > limit and ends_by == "away" else prefers_longer(text)

    settings = "pairs.principles=['Be long.']", "actors.max_concurrent_rollouts=3"
    with server(reply_to=reply) as (url, _):
        recipe = *judged_by(url, at_once=1), *settings
        assert pairs(*recipe, code=code) is None
        assert ("the same command goes on" in pairs.said) == (ends_by == "away")
        assert "never retrieved" not in pairs.said
        file = pairs.folder / "comparisons.jsonl"
        with file.open("a") as cut_off:
            cut_off.write('{"id": "half')
        before = read_rows(file)
        assert 0 < len(before) < 4
        pairs(*recipe, "actors.temperature=0.5", code=2)
        assert "was made with actors.temperature = 1" in pairs.said
        limit = 1000
        asked.clear()
        pairs(*recipe, "pairs.judge.at_once=2")
    rows = read_rows(file)
    assert rows[: len(before)] == before
    later = {answer for row in rows[len(before) :] for answer in row["answers"]}
    assert {answer for two in asked for answer in two} <= later
    assert len({row["id"] for row in rows}) == len(rows) == 4


@pytest.mark.parametrize("flag", [[], ["--replace"]])
def test_a_set_that_another_command_makes_is_refused_and_left_as_it_is(pairs, tiny_model, flag):
    pairs.folder.mkdir(parents=True)
    (pairs.folder / "comparisons.jsonl").write_text("{}\n")
    with locked(pairs.folder.with_name(".small-pairs.lock")):
        pairs(*BY_REWARD, flags=("--policy", tiny_model, *flag), code=2)
    assert "another command is making runs/small-pairs; wait for its end" in pairs.said
    assert [file.name for file in pairs.folder.iterdir()] == ["comparisons.jsonl"]


@pytest.mark.parametrize(("failing", "code"), [(1, 0), (4, 1)])
def test_prompts_whose_judge_fails_are_left_out_and_named(pairs, failing, code):
    refused = set()

    def reply(text):
        question = re.search(r"Question:\n(.*)\n", text)[1]
        if len(refused) < failing:
            refused.add(question)
        return 404 if question in refused else prefers_longer(text)

    with server(reply_to=reply) as (url, _):
        report = pairs(*judged_by(url, at_once=1), "pairs.principles=['Be long.']", code=code)
    assert f"{failing} of 4 prompts failed; the first: {url}" in pairs.said
    assert (report and (report["failed"], report["prompts"])) == ((1, 3) if code == 0 else None)
    written = {row["prompt"] for row in read_rows(pairs.folder / "comparisons.jsonl")}
    assert not written & refused


@pytest.mark.parametrize("reward_name", ["paired:score", "paired:of_group"])
def test_rewards_compare_in_place_of_a_judge(pairs, tiny_model, reward_name):
    by_reward = f"pairs.rewards=['{reward_name}']", *BY_REWARD[1:]
    report = pairs(*by_reward, "pairs.choose=adjacent", "pairs.margin=0.2")
    assert "agreement" not in report

    def reward(text):
        return sum(map(ord, text)) % 7 / 7

    answers = [row["answers"] for row in read_rows(pairs.folder / "comparisons.jsonl")]
    ranked = [sorted(map(reward, group), reverse=True) for group in answers]
    steps = [high - low for group in ranked for high, low in pairwise(group) if high - low >= 0.2]
    examples = read_rows(pairs.folder / "pairs.jsonl")
    assert [reward(row["chosen"]) - reward(row["rejected"]) for row in examples] == steps
    assert report["pairs"] == len(steps) > 0
    assert report["ties"] > 0
    again = pairs(*by_reward, flags=("--replace", "--policy", tiny_model))
    assert again["pairs"] == len(read_rows(pairs.folder / "pairs.jsonl")) == 5


def test_prompts_are_those_of_the_source_that_are_not_held_out(pairs, tmp_path):
    rows = [{"prompt": f"{n}+1="} for n in range(6)] + [{"prompt": TALK}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    settings = (
        "prompts.source=files", 'prompts.source_options={ path = "train.jsonl" }',
        "heldout.source=files", 'heldout.source_options={ path = "held.jsonl" }',
        "heldout.size=2", "heldout.final_size=2",
    )  # fmt: skip
    report = pairs(*BY_REWARD, *settings)
    examples = read_rows(pairs.folder / "pairs.jsonl")
    assert report["prompts"] == 5
    assert [row["prompt"] for row in rows[2:]] == sorted(
        (row["prompt"] for row in read_rows(pairs.folder / "comparisons.jsonl")),
        key=lambda prompt: (isinstance(prompt, list), str(prompt)),
    )
    (talk,) = [row for row in examples if isinstance(row["prompt"], list)]
    assert talk["prompt"] == TALK
    assert [message["role"] for message in talk["chosen"]] == ["assistant"]
    file = str(pairs.folder / "pairs.jsonl")
    read = [*islice(load_examples(PREFERENCES, file, options={}, seed=0, heldout=frozenset()), 5)]
    assert (Message(**talk["chosen"][0]),) in {chosen for _, chosen, _ in read}
    assert len(read) == report["pairs"] == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "has no [pairs] section"),
        (["pairs.samples=4"], "neither judge nor rewards is given"),
        ([BY_REWARD[0], "pairs.judge={ url = 'http://x/v1', model = 'm' }"], "both judge and"),
        ([BY_REWARD[0], "pairs.samples=1"], "pairs.samples"),
        ([BY_REWARD[0], "pairs.prompts=0"], "pairs.prompts"),
        ([BY_REWARD[0], "pairs.principles=['x']"], "for judge alone"),
        (["pairs.judge={ url = 'http://x/v1', model = 'm' }", "pairs.margin=1"], "leave it out"),
        (["pairs.judge={ url = 'http://x/v1', model = 'm' }"], "pairs.principles = () has no text"),
        (["pairs.principles=[]", "pairs.judge={ url = 'http://x/v1', model = 'm' }"], "no text"),
        (["pairs.principles=[' ']", "pairs.judge={ url = 'http://x/v1' }"], "pairs.principles"),
        (["pairs.principles='no.txt'", "pairs.judge={ url = 'http://x/v1', model = 'm' }"],
         "pairs.principles = 'no.txt' cannot be read"),
        (["pairs.principles='empty.txt'", "pairs.judge={ url = 'http://x/v1', model = 'm' }"],
         "'empty.txt' has no text"),
        (["pairs.principles=['x']", "pairs.judge={ model = 'm' }"], "requires the option url"),
        (["pairs.rewards=[]", "pairs.judge={ url = 'http://x/v1', model = 'm' }"],
         "pairs.rewards = []: must be at least 1"),
        (["pairs.rewards=['tgas']"], "did you mean 'tags'?"),
        (["pairs.rewards=['reward_model']"], "which does not exist yet"),
        (["pairs.rewards=['llm_judge']"], "requires the option url"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_before_anything_is_written(pairs, tmp_path, settings, words):
    (tmp_path / "empty.txt").write_text("\n \n")
    before = {*tmp_path.rglob("*")}
    pairs(*settings, code=2)
    assert words in pairs.said
    assert "Traceback" not in pairs.said
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= before


def test_the_models_that_a_recipe_begins_with_must_be_whole(pairs):
    pairs(*BY_REWARD, code=2, flags=())
    assert "run `headway sft`" in pairs.said
    pairs(*BY_REWARD, "learner.lora.path=mine", "learner.lora.rank=4", code=2, flags=())
    assert "`headway pairs` plays with a model" in pairs.said
