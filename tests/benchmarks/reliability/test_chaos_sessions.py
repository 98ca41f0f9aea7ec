"""The oracle of killed conversations finds turns and calls that were made again."""

import pytest

from benchmarks.reliability.chaos_sessions import WRONG, Ended, Note, judge_sessions
from queues.records import FinishReason, Turn
from queues.turns import encode_turn
from tests.queues.conftest import make_rollout

CHARACTERS = [*"=,0123456789", "<eos>"]
ROLLOUT = make_rollout(1, (5,) * 5, token_ids=[9, 9, 9, 0, 3, 1, 12, 9])
"""The policy wrote "=1,<eos>7", with the call "1"."""
TURN = ("g", 1, "turn/0")


def noted(**changes):
    """Return a note of the rollout's sampled tokens, of an earlier attempt."""
    turn = Turn(
        **{
            "number": 0, "parent": -1, "shared": 0, "injected": ROLLOUT.token_ids[:3],
            "token_ids": ROLLOUT.token_ids[3:], "versions": ROLLOUT.versions[3:],
            "behavior_logprobs": ROLLOUT.behavior_logprobs[3:],
            "finish_reason": FinishReason.STOP, "cache_salt": "", **changes,
        }
    )  # fmt: skip
    return Note(1, encode_turn(turn))


SAMPLED_AGAIN = noted(versions=[4] * 5)


def called(*times, expression="1"):
    return [{"call": "7", "expression": expression, "at": at} for at in times]


def answered(turn, answer):
    return {"rollout": "g/1", "turn": turn, "answer": answer, "pid": 1, "at": 50.0}


@pytest.mark.parametrize(
    ("seen", "start", "log", "expected"),
    [
        ([(TURN, noted())], 5, [], {"turns_gone_on_from": 1}),
        ([(TURN, SAMPLED_AGAIN)], 4, [], {"turns_made_again": 1}),
        ([(TURN, SAMPLED_AGAIN)], 5, [], {"turns_too_old": 1}),
        ([], 5, [answered(0, "x"), answered(0, "x")], {"answers": 2, "answers_repeated": 1}),
        ([], 5, [answered(0, "x"), answered(1, "y")], {"answers": 2}),
        ([], 5, [answered(0, "x"), answered(0, "y")], {"answers": 2, "answers_differ": 1}),
        (
            [(TURN, SAMPLED_AGAIN)], 5, [answered(0, "x"), answered(0, "y")],
            {"turns_too_old": 1, "answers": 2, "answers_too_old": 1},
        ),
        ([], 5, called(9.0), {"calls": 1}),
        ([], 5, called(9.0, 50.0), {"calls": 2, "calls_made_again": 1}),
        ([], 5, called(99.5, 130.0), {"calls": 2, "calls_in_flight": 1}),
        ([], 5, called(9.0, expression="2"), {"calls": 1, "calls_made_again": 1}),
    ],
)  # fmt: skip
def test_what_became_of_noted_turns_answers_and_calls_is_counted(seen, start, log, expected):
    ended = {"g": Ended("trained", 2, start, {1: ROLLOUT})}
    counts = judge_sessions(seen, ended, log, [100.0], CHARACTERS)
    assert counts.pop("groups_trained") == 1
    assert {name: count for name, count in counts.items() if count} == expected
    assert any(counts.get(name) for name in WRONG) == any(name in WRONG for name in expected)
