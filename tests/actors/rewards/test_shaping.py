"""Punishments for length: their values, where they apply, and the task reward that they leave."""

from dataclasses import replace

import pytest
from fakes import Recited, lease, play
from hypothesis import given
from hypothesis import strategies as st

from actors.config import ActorsConfig, OverlongConfig
from actors.engines.protocol import SamplingParameters
from actors.rewards import shaping_parts
from actors.rewards.shaping import overlong_penalty
from queues.records import SHAPING, FinishReason, Purpose

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_the_overlong_punishment_is_that_of_the_paper_with_a_floor(
    length: int, expected: float
) -> None:
    assert overlong_penalty(length, limit=20480, buffer=4096) == expected
    assert overlong_penalty(length, limit=20480, buffer=4096, factor=3.0) == 3 * expected


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 100), st.floats(0.1, 10))
def test_the_punishment_never_falls_with_length_and_stays_within_the_factor(
    length: int, limit: int, share: int, factor: float
) -> None:
    buffer = max(1, limit * share // 100)
    values = [
        overlong_penalty(n, limit=limit, buffer=buffer, factor=factor) for n in (length, length + 1)
    ]
    assert 0 >= values[0] >= values[1] >= -factor
    assert overlong_penalty(limit - buffer, limit=limit, buffer=buffer, factor=factor) == 0


def test_only_what_is_configured_becomes_a_part() -> None:
    assert shaping_parts(ActorsConfig(max_new_tokens=10), 10, LENGTH, space=99) == {}
    overlong = ActorsConfig(max_new_tokens=10, overlong=OverlongConfig(buffer=4))
    assert [shaping_parts(overlong, n, STOP, space=99) for n in (6, 8)] == [
        {"overlong": 0.0},
        {"overlong": -0.5},
    ]
    eos = ActorsConfig(max_new_tokens=10, missing_eos_penalty=0.25)
    assert [shaping_parts(eos, 9, end, space=99) for end in (STOP, LENGTH)] == [
        {"missing_eos": 0.0},
        {"missing_eos": -0.25},
    ]


def test_every_part_is_one_that_the_queues_take_off_for_the_task_reward() -> None:
    config = ActorsConfig(
        max_new_tokens=8, overlong=OverlongConfig(buffer=4, factor=2.0), missing_eos_penalty=0.5
    )
    assert shaping_parts(config, 7, LENGTH, space=99).keys() == SHAPING


SHAPED = {"overlong": OverlongConfig(buffer=4)}


def test_a_long_training_rollout_earns_less_and_its_task_reward_is_what_it_was() -> None:
    sampling = SamplingParameters(temperature=1, max_new_tokens=8)
    rollout = play(Recited("bbbb=7"), sampling=sampling, **SHAPED)
    assert sum(rollout.loss_mask) == 7
    assert [*rollout.reward_parts.items()] == [("last_answer", 1.0), ("overlong", -0.75)]
    assert (rollout.reward, rollout.task_reward) == (0.25, 1.0)


def test_where_the_context_ends_first_its_end_is_the_limit() -> None:
    shaping = ActorsConfig(max_new_tokens=10, overlong=OverlongConfig(buffer=4))
    result = [shaping_parts(shaping, n, STOP, space=8)["overlong"] for n in (4, 6, 8)]
    assert result == [0.0, -0.5, -1.0]
    half = ActorsConfig(max_new_tokens=10, overlong=OverlongConfig(share=0.5))
    assert [shaping_parts(half, n, STOP, space=4)["overlong"] for n in (2, 3, 4)] == [
        0.0,
        -0.5,
        -1.0,
    ]
    assert shaping_parts(shaping, 0, STOP, space=2) == {"overlong": 0.0}
    sampling = SamplingParameters(temperature=1, max_new_tokens=8)
    rollout = play(Recited("bbbb=7"), sampling=sampling, **SHAPED, max_model_len=11)
    assert sum(rollout.loss_mask) == 11 - rollout.prompt_length == 7
    assert rollout.reward_parts == {"last_answer": 1.0, "overlong": -1.0}


def test_a_rollout_that_was_cut_off_loses_both() -> None:
    sampling = SamplingParameters(temperature=1, max_new_tokens=8)
    shaping = {**SHAPED, "missing_eos_penalty": 0.5}
    rollout = play(Recited("b" * 20), sampling=sampling, **shaping)
    assert rollout.finish_reason is LENGTH
    assert rollout.reward_parts == {"last_answer": 0.0, "overlong": -1.0, "missing_eos": -0.5}
    assert (rollout.reward, rollout.task_reward) == (-1.5, 0.0)


def test_held_out_scores_are_what_the_task_says() -> None:
    sampling = SamplingParameters(temperature=1, max_new_tokens=8)
    evaluated = replace(lease(), purpose=Purpose.EVALUATE)
    rollout = play(Recited("bbbb=7"), of=evaluated, sampling=sampling, **SHAPED)
    assert (rollout.reward, rollout.reward_parts) == (1.0, {"last_answer": 1.0})


def test_the_length_of_a_conversation_is_what_the_policy_sampled_in_all_turns() -> None:
    sampling = SamplingParameters(temperature=1, max_new_tokens=8)
    rollout = play(
        Recited("a", "b=2"), of=lease(answer="2"), sampling=sampling,
        environment="user_module:Countdown", **SHAPED,
    )  # fmt: skip
    assert sum(rollout.loss_mask) == 6
    assert rollout.reward_parts == {"environment": 1.0, "last_answer": 1.0, "overlong": -0.5}
    assert rollout.task_reward == 2.0


@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 60), st.integers(1, 40))
def test_without_tokens_of_an_environment_the_smaller_limit_counts(
    length: int, most: int, space: int, buffer: int
) -> None:
    config = ActorsConfig(max_new_tokens=most, overlong=OverlongConfig(buffer=min(buffer, most)))
    limit = min(most, space)
    expected = overlong_penalty(length, limit=limit, buffer=min(buffer, limit))
    assert shaping_parts(config, length, STOP, space=space)["overlong"] == expected


@pytest.mark.parametrize(
    ("sampled", "injected", "expected"),
    [(4, 0, 0.0), (4, 12, 0.0), (4, 14, -0.5), (4, 16, -1.0), (4, 99, -1.0), (8, 0, -0.5)],
)
def test_tokens_of_tools_fill_the_context_and_not_the_budget_of_the_policy(
    sampled: int, injected: int, expected: float
) -> None:
    config = ActorsConfig(max_new_tokens=10, overlong=OverlongConfig(buffer=4))
    parts = shaping_parts(config, sampled, LENGTH, space=20, injected=injected)
    assert parts == {"overlong": expected}


@pytest.mark.parametrize(
    ("max_model_len", "turns", "penalty"),
    [(30, 2, 0.0), (16, 2, -0.75), (13, 2, -1.0), (12, 1, -1.0)],
)
def test_a_conversation_that_fills_the_context_is_overlong_whoever_filled_it(
    max_model_len: int, turns: int, penalty: float
) -> None:
    """Prompt 4, first message 2, the environment's reply 6, second message 3 tokens."""
    rollout = play(
        Recited("a", "bb"), of=lease(answer="2"), max_model_len=max_model_len,
        environment="user_module:Countdown", **SHAPED,
    )  # fmt: skip
    assert rollout.turns == turns
    assert rollout.reward_parts["overlong"] == penalty


def test_a_reply_that_does_not_fit_ends_a_rollout_as_overlong() -> None:
    rollout = play(
        Recited("b=7"), of=lease(answer="7"), environment="user_module:Verbose", **SHAPED
    )
    assert (rollout.turns, rollout.finish_reason) == (1, LENGTH)
    assert rollout.reward_parts["overlong"] == -1.0


def test_a_conversation_cut_off_after_its_most_turns_is_not_overlong() -> None:
    rollout = play(
        Recited("a", "b"), of=lease(answer="9"), environment="user_module:Countdown", max_turns=2,
        max_model_len=60, **SHAPED,
    )  # fmt: skip
    assert rollout.finish_reason is LENGTH
    assert rollout.reward_parts["overlong"] == 0.0
