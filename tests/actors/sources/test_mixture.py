"""Mixes of sources: shares, schedules, ids, and what is held out."""

from collections import Counter

import pytest
from row_files import write_rows

from actors.sources.load_source import load_source
from actors.sources.mixture import weight_at
from headway.errors import InputError


def rows(path, letter, count=50):
    path = write_rows(path, *({"prompt": f"{letter}{i}"} for i in range(count)))
    return {"source": "files", "options": {"path": path}}


def mixture(parts, **keywords):
    return load_source("mixture", options={"parts": parts}, **{"seed": 0, **keywords})


def test_shares_follow_the_weights(tmp_path):
    parts = [
        {**rows(tmp_path / "a.jsonl", "a"), "weight": 3},
        {**rows(tmp_path / "b.jsonl", "b"), "weight": 1},
    ]
    drawn = Counter(prompt.text[0] for prompt in mixture(parts).next(4000))
    assert drawn["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_schedule_goes_over_from_easy_to_hard(tmp_path):
    parts = [
        {**rows(tmp_path / "e.jsonl", "e"), "weight": [[100, 1.0], [300, 0.0]]},
        {**rows(tmp_path / "h.jsonl", "h"), "weight": [[100, 0.0], [300, 1.0]]},
    ]
    texts = [prompt.text[0] for prompt in mixture(parts).next(400)]
    assert set(texts[:100]) == {"e"}
    assert set(texts[301:]) == {"h"}
    assert 0.3 < texts[100:300].count("h") / 200 < 0.7


def test_one_of_each_part_can_be_looked_at_without_moving_on(tmp_path):
    parts = [
        {**rows(tmp_path / "e.jsonl", "e"), "weight": [[100, 1.0], [300, 0.0]]},
        {**rows(tmp_path / "h.jsonl", "h"), "weight": [[100, 0.0], [300, 1.0]]},
    ]
    looked, fresh = mixture(parts), mixture(parts)
    looked.next(5), fresh.next(5)
    prompts = looked.one_of_each()
    assert [prompt.metadata["part"] for prompt in prompts] == ["0", "1"]
    assert looked.cursor() == fresh.cursor()
    assert looked.next(400) == fresh.next(400)


def test_a_weight_moves_in_straight_lines_and_stays_outside_of_its_points():
    points = ((10, 1.0), (20, 0.0), (40, 2.0))
    assert [weight_at(points, position) for position in (0, 10, 15, 20, 30, 40, 99)] == [
        1.0, 1.0, 0.5, 0.0, 1.0, 2.0, 2.0,
    ]  # fmt: skip
    assert weight_at(0.25, 7) == 0.25


def test_prompts_name_their_part_and_differ_though_parts_are_of_one_task():
    parts = [
        {"source": "reasoning_gym:chain_sum", "options": {"level": 0}, "name": "easy"},
        {"source": "reasoning_gym:chain_sum", "options": {"level": 5}},
    ]
    prompts = mixture(parts).next(60)
    assert len({prompt.prompt_id for prompt in prompts}) == 60
    assert {prompt.metadata["part"] for prompt in prompts} == {"easy", "1"}
    easy = next(prompt for prompt in prompts if prompt.metadata["part"] == "easy")
    hard = next(prompt for prompt in prompts if prompt.metadata["part"] == "1")
    assert easy.prompt_id == "easy:chain_sum/0/0"
    assert easy.metadata["options"]["max_terms"] < hard.metadata["options"]["max_terms"]


def test_the_held_out_problems_come_from_every_part_and_no_part_trains_them(tmp_path):
    shared = rows(tmp_path / "a.jsonl", "a", 20)
    parts = [shared, {**shared, "name": "again"}, rows(tmp_path / "b.jsonl", "b", 20)]
    held_out = mixture(parts, split="heldout", heldout_size=7).next(7)
    assert Counter(prompt.metadata["part"] for prompt in held_out) == {"0": 3, "again": 2, "2": 2}
    trained = {prompt.text for prompt in mixture(parts, heldout_size=7).next(500)}
    assert not trained & {prompt.text for prompt in held_out}
    assert len(trained) == 40 - len({prompt.text for prompt in held_out})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "requires the option parts"),
        ({"parts": []}, "at least 1 item"),
        ({"parts": [{"source": "a"}], "seed": 1}, "no option seed; its options: parts"),
        ({"parts": [{"weight": 1}]}, "source"),
        ({"parts": [{"source": "lettered_chain_sum", "weight": -1}]}, "0 or more"),
        ({"parts": [{"source": "lettered_chain_sum", "weight": [[5, 1], [5, 2]]}]}, "rising"),
        ({"parts": [{"source": "lettered_chain_sum", "weight": 0}]}, "are 0 at prompt 0"),
        ({"parts": [{"source": "lettered_chain_sum", "weight": [[0, 1], [9, 0]]}]}, "prompt 9"),
        ({"parts": [{"source": "lettered_chain_sum", "name": "a/b"}]}, "no '/'"),
        ({"parts": [{"source": "nothing"}]}, "expected one of files"),
        ({"parts": ["lettered_chain_sum"]}, "parts"),
    ],
)  # fmt: skip
def test_a_mix_that_cannot_be_drawn_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        load_source("mixture", options=options, seed=0)


@pytest.mark.parametrize(
    ("task", "level", "message"),
    [("chain_sum", -1, "from 0"), ("chain_sum", 99, "from 0 to 10"), ("chain_sum", "x", "whole")],
)
def test_a_level_that_a_curriculum_lacks_is_refused(task, level, message):
    with pytest.raises(InputError, match=message):
        load_source(f"reasoning_gym:{task}", options={"level": level}, seed=0)
