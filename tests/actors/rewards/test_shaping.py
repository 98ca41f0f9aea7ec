"""Punishments for length: their values, where they apply, and the task reward that they leave."""

from dataclasses import replace

import pytest
from fakes import SAMPLING, Recited, lease, play
from hypothesis import given
from hypothesis import strategies as st

from actors.config import ActorsConfig, OverlongConfig
from actors.rewards.shaping import overlong_penalty, shaping_parts
from queues.records import SHAPING, FinishReason, Purpose

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def overlong(most=10, **section):
    return ActorsConfig(max_new_tokens=most, overlong=OverlongConfig(**section))


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_the_overlong_punishment_is_that_of_the_paper_with_a_floor(length, expected):
    assert overlong_penalty(length, limit=20480, buffer=4096) == expected
    assert overlong_penalty(length, limit=20480, buffer=4096, factor=3.0) == 3 * expected


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 100), st.floats(0.1, 10))
def test_the_punishment_never_falls_with_length_and_stays_within_the_factor(
    length, limit, share, factor
):
    bounds = {"limit": limit, "buffer": max(1, limit * share // 100), "factor": factor}
    values = [overlong_penalty(n, **bounds) for n in (length, length + 1)]
    assert 0 >= values[0] >= values[1] >= -factor
    assert overlong_penalty(limit - bounds["buffer"], **bounds) == 0


def test_only_what_is_configured_becomes_a_part():
    assert shaping_parts(ActorsConfig(max_new_tokens=10), 10, LENGTH, space=99) == {}
    parts = [shaping_parts(overlong(buffer=4), n, STOP, space=99) for n in (6, 8)]
    assert parts == [{"overlong": 0.0}, {"overlong": -0.5}]
    eos = ActorsConfig(max_new_tokens=10, missing_eos_penalty=0.25)
    parts = [shaping_parts(eos, 9, end, space=99) for end in (STOP, LENGTH)]
    assert parts == [{"missing_eos": 0.0}, {"missing_eos": -0.25}]


def test_every_part_is_one_that_the_queues_take_off_for_the_task_reward():
    config = ActorsConfig(
        max_new_tokens=8, overlong=OverlongConfig(buffer=4, factor=2.0), missing_eos_penalty=0.5
    )
    assert shaping_parts(config, 7, LENGTH, space=99).keys() == SHAPING


@pytest.mark.parametrize(
    ("section", "space", "lengths", "expected"),
    [
        ({"buffer": 4}, 8, (4, 6, 8), [0.0, -0.5, -1.0]),
        ({"share": 0.5}, 4, (2, 3, 4), [0.0, -0.5, -1.0]),
        ({"buffer": 4}, 2, (0,), [0.0]),
    ],
)
def test_where_the_context_ends_first_its_end_is_the_limit(section, space, lengths, expected):
    config = overlong(**section)
    assert [shaping_parts(config, n, STOP, space=space)["overlong"] for n in lengths] == expected


@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 60), st.integers(1, 40))
def test_without_tokens_of_an_environment_the_smaller_limit_counts(length, most, space, buffer):
    config, limit = overlong(most, buffer=min(buffer, most)), min(most, space)
    expected = overlong_penalty(length, limit=limit, buffer=min(buffer, limit))
    assert shaping_parts(config, length, STOP, space=space)["overlong"] == expected


@pytest.mark.parametrize(
    ("sampled", "injected", "expected"),
    [(4, 0, 0.0), (4, 12, 0.0), (4, 14, -0.5), (4, 16, -1.0), (4, 99, -1.0), (8, 0, -0.5)],
)
def test_tokens_of_tools_fill_the_context_and_not_the_budget_of_the_policy(
    sampled, injected, expected
):
    parts = shaping_parts(overlong(buffer=4), sampled, LENGTH, space=20, injected=injected)
    assert parts == {"overlong": expected}


TALK = {"of": lease(answer="2"), "environment": "user_module:Countdown"}
FILLED = {**TALK, "sampling": SAMPLING}
"""Prompt 4, first message 2, the environment's reply 6, second message 3 tokens."""


@pytest.mark.parametrize(
    ("lines", "settings", "sampled", "parts"),
    [
        (["bbbb=7"], {}, 7, {"last_answer": 1.0, "overlong": -0.75}),
        (["bbbb=7"], {"max_model_len": 11}, 7, {"last_answer": 1.0, "overlong": -1.0}),
        (["b" * 20], {"missing_eos_penalty": 0.5}, 8,
         {"last_answer": 0.0, "overlong": -1.0, "missing_eos": -0.5}),
        (["bbbb=7"], {"of": replace(lease(), purpose=Purpose.EVALUATE)}, 7, {"last_answer": 1.0}),
        (["a", "b=2"], TALK, 6, {"environment": 1.0, "last_answer": 1.0, "overlong": -0.5}),
        (["a", "bb"], {**FILLED, "max_model_len": 30}, 5,
         {"environment": 1.0, "last_answer": 0.0, "overlong": 0.0}),
        (["a", "bb"], {**FILLED, "max_model_len": 16}, 5,
         {"environment": 1.0, "last_answer": 0.0, "overlong": -0.75}),
        (["a", "bb"], {**FILLED, "max_model_len": 13}, 3,
         {"environment": 1.0, "last_answer": 0.0, "overlong": -1.0}),
        (["a", "bb"], {**FILLED, "max_model_len": 12}, 2,
         {"environment": 0.5, "last_answer": 0.0, "overlong": -1.0}),
        (["b=7"], {"sampling": SAMPLING, "environment": "user_module:Verbose"}, 4,
         {"environment": 0.5, "last_answer": 0.0, "overlong": -1.0}),
        (["a", "b"], {**FILLED, "of": lease(answer="9"), "max_turns": 2, "max_model_len": 60}, 4,
         {"environment": 1.0, "last_answer": 0.0, "overlong": 0.0}),
    ],
    ids=["long", "context ends first", "cut off loses both", "held out", "length of all turns",
         "space", "less space", "space for one token", "no space", "reply that does not fit",
         "most turns"],
)  # fmt: skip
def test_a_rollout_loses_by_its_length_and_keeps_its_task_reward(lines, settings, sampled, parts):
    short = replace(SAMPLING, max_new_tokens=8)
    section = OverlongConfig(buffer=4)
    rollout = play(Recited(*lines), **{"sampling": short, "overlong": section, **settings})
    assert sum(rollout.loss_mask) == sampled
    assert [*rollout.reward_parts.items()] == [*parts.items()]
    assert rollout.reward == sum(parts.values())
    assert rollout.task_reward == sum(n for part, n in parts.items() if part not in SHAPING)
