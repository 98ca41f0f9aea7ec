"""Mixes of sources: shares, schedules, ids, and what is held out."""

from collections import Counter

import pytest
from row_files import write_rows

from actors.sources.load_source import load_source
from actors.sources.mixture import weight_at


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


@pytest.fixture
def schedule(tmp_path):
    """Provide an easy and a hard part, whose weights cross."""
    return [
        {**rows(tmp_path / "e.jsonl", "e"), "weight": [[100, 1.0], [300, 0.0]]},
        {**rows(tmp_path / "h.jsonl", "h"), "weight": [[100, 0.0], [300, 1.0]]},
    ]


def test_a_schedule_goes_over_from_easy_to_hard(schedule):
    texts = [prompt.text[0] for prompt in mixture(schedule).next(400)]
    assert set(texts[:100]) == {"e"}
    assert set(texts[301:]) == {"h"}
    assert 0.3 < texts[100:300].count("h") / 200 < 0.7


def test_one_of_each_part_can_be_looked_at_without_moving_on(schedule):
    looked, fresh = mixture(schedule), mixture(schedule)
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


def test_a_data_set_keeps_its_own_field_part(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "a", "metadata": {"part": "own"}})
    [prompt] = mixture([{"source": "files", "options": {"path": path}}]).next(1)
    assert prompt.metadata == {"part": "own", "headway:part": "0"}


def test_the_held_out_problems_come_from_every_part_and_no_part_trains_them(tmp_path):
    shared = rows(tmp_path / "a.jsonl", "a", 20)
    parts = [shared, {**shared, "name": "again"}, rows(tmp_path / "b.jsonl", "b", 20)]
    held_out = mixture(parts, split="heldout", heldout_size=7).next(7)
    assert Counter(prompt.metadata["part"] for prompt in held_out) == {"0": 3, "again": 2, "2": 2}
    trained = {prompt.text for prompt in mixture(parts, heldout_size=7).next(500)}
    assert not trained & {prompt.text for prompt in held_out}
    assert len(trained) == 40 - len({prompt.text for prompt in held_out})
