"""The tree of errors: exit codes, and fields that survive the way between processes."""

import inspect
import pickle

import pytest

import actors.errors
import deploy.errors
import learner.errors
import queues.errors
import weight_sync.errors
from headway.errors import HeadwayError, InputError, first_line, is_bad_input

PACKAGES = (actors.errors, deploy.errors, learner.errors, queues.errors, weight_sync.errors)
ERRORS = {
    name: error
    for module in PACKAGES
    for name, error in inspect.getmembers(module, inspect.isclass)
    if issubclass(error, BaseException)
}


@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
def test_every_error_is_below_the_root_exits_with_2_for_bad_input_and_survives_pickling(kind):
    assert issubclass(kind, HeadwayError)
    assert (kind.exit_code == 2) == issubclass(kind, InputError)
    error = kind("no such model", exit_code=7).with_hint("type `headway ls`")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.exit_code) == (kind, 7)
    assert str(again) == str(error) == "no such model\ntype `headway ls`"
    assert again.__dict__ == error.__dict__


def test_bad_input_is_known_by_the_exit_code_of_an_error_which_is_not_that_of_its_type():
    assert is_bad_input(InputError("x"))
    assert is_bad_input(HeadwayError("x", exit_code=2))
    assert (HeadwayError.exit_code, HeadwayError.hint) == (1, "")
    assert not is_bad_input(HeadwayError("x"))
    assert not is_bad_input(ValueError("x"))


def test_the_first_line_of_an_error_without_a_message_is_its_type():
    assert first_line(ValueError(" a\nb")) == "a"
    assert first_line(ValueError("a:\n  b\nc")) == "a: b"
    assert first_line(ValueError()) == "ValueError"
