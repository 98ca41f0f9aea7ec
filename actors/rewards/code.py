"""The reward `code`: a program that the policy wrote passes its tests in the sandbox.

Expected results never enter the sandbox, where a program could read them.
"""

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from actors.rewards.fenced_blocks import read_block
from actors.rewards.find_reward import Metadata
from actors.sandbox.sandbox import Sandbox

CALLER = """
import contextlib, json, sys
request = json.load(sys.stdin)
answers, space = sys.stdout, {"__name__": "candidate"}
def plain(value):
    return sorted(value) if isinstance(value, (set, frozenset)) else f"{value!r}, not JSON"
with contextlib.redirect_stdout(sys.stderr):
    exec(compile(request["program"], "candidate", "exec"), space)
    for call in request["calls"]:
        try:
            answer = json.dumps([eval(call, space)], default=plain)
        except Exception as error:
            answer = "null"
            print(repr(error), file=sys.stderr)
        print(answer, file=answers, flush=True)
"""


class Dialogue(NamedTuple):
    """A test of a whole program."""

    stdin: str
    stdout: str
    """Compared line by line, without white space at their ends."""


class Call(NamedTuple):
    """A test of a function."""

    expression: str
    """As "add(1, 2)"."""
    result: Any
    """As JSON has it: a tuple is a list, a set a sorted list."""


def code(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Metadata,
    *,
    score: Literal["all", "share"] = "all",
    seconds: float = 10.0,
    memory_mib: int = 256,
    folders: Sequence[str] = (),
) -> float:
    """1 where a program of Python's standard library passes its tests; else 0.

    The program is the block that `read_block` finds for Python, or the whole completion. `tests` in
    the metadata is a list of {"stdin": …, "stdout": …}, {"call": "add(1, 2)", "result": 3}, or
    texts like "assert add(1, 2) == 3" whose right side is a literal; `share` scores the share that
    passes. `seconds` is the program's time in all tests together; actors.reward_timeout_seconds has
    to cover the start of the sandboxes too, one for all calls and one for each dialogue. Programs
    may import from `folders` of the machine too.

    Raises ValueError without tests that can be read, and as `Sandbox.run` does.
    """
    program = read_block(completion, "python", "py")
    tests = read_tests(metadata.get("tests"))
    passed, remaining = 0, seconds
    for run in _runs(tests):
        sandbox = Sandbox(seconds=remaining, memory_mib=memory_mib, folders=tuple(folders))
        count, spent = _run_tests(program, run, sandbox)
        passed += count
        remaining -= spent
        if remaining <= 0 or (score == "all" and count < len(run)):
            break
    return passed / len(tests) if score == "share" else float(passed == len(tests))


def read_tests(tests: Any) -> list[Dialogue | Call]:
    """Parse the tests of a prompt; raise ValueError if there are none, or one has another form."""
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the metadata of the prompt has tests = {tests!r}, must be a list")
    return [_read_test(test) for test in tests]


def _read_test(test: Any) -> Dialogue | Call:
    if isinstance(test, str):
        return _read_assertion(test)
    if isinstance(test, Mapping):
        if test.keys() == {"stdin", "stdout"}:
            return Dialogue(str(test["stdin"]), str(test["stdout"]))
        if test.keys() == {"call", "result"} and isinstance(test["call"], str):
            return Call(test["call"], test["result"])
    raise ValueError(
        f"a test is {test!r}, must be an object with stdin and stdout, or with call and result, or "
        'a text like "assert add(1, 2) == 3"'
    )


def _read_assertion(text: str) -> Call:
    try:
        (statement,) = ast.parse(text.strip()).body
        assert isinstance(statement, ast.Assert)
        compared = statement.test
        assert isinstance(compared, ast.Compare)
        (operator,), (literal,) = compared.ops, compared.comparators
        assert isinstance(operator, (ast.Eq, ast.Is))
        result = json.loads(json.dumps(ast.literal_eval(literal), default=_sorted_set))
    except (AssertionError, SyntaxError, TypeError, ValueError):
        raise ValueError(
            f'the test {text!r} cannot be judged outside the sandbox; must be like "assert add(1, '
            "2) == 3\", one comparison with a literal of JSON's types, tuples or sets"
        ) from None
    return Call(ast.unparse(compared.left), result)


def _sorted_set(value: Any) -> list[Any]:
    """Return a set as JSON has it, for `json.dumps`; raise TypeError for any other value."""
    if not isinstance(value, (set, frozenset)):
        raise TypeError(f"{value!r} is not JSON")
    return sorted(value)


def _runs(tests: Sequence[Dialogue | Call]) -> Iterator[list[Dialogue] | list[Call]]:
    """Group the tests by run of the program: all calls, and each dialogue by itself."""
    calls = [test for test in tests if isinstance(test, Call)]
    if calls:
        yield calls
    yield from ([test] for test in tests if isinstance(test, Dialogue))


def _run_tests(program: str, run: Sequence[Dialogue | Call], sandbox: Sandbox) -> tuple[int, float]:
    """Return how many tests of one run pass, and the seconds that the program took."""
    first = run[0]
    if isinstance(first, Dialogue):
        outcome = sandbox.run(program, first.stdin)
        ended = (outcome.ended, outcome.code) == ("exit", 0)
        return int(ended and _lines(outcome.stdout) == _lines(first.stdout)), outcome.seconds
    calls = [test for test in run if isinstance(test, Call)]
    request = {"program": program, "calls": [call.expression for call in calls]}
    outcome = sandbox.run(CALLER, json.dumps(request))
    answers = zip(outcome.stdout.split("\n"), calls, strict=False)
    return sum(_is_right(line, call.result) for line, call in answers), outcome.seconds


def _is_right(line: str, expected: Any) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and len(value) == 1 and _equal(value[0], expected)


def _equal(actual: Any, expected: Any) -> bool:
    """Compare two JSON values; numbers that are not whole may differ by a share of 1e-9."""
    if _is_number(expected) and _is_number(actual):
        return bool(actual == expected) or (
            isinstance(expected, float) and math.isclose(actual, expected, abs_tol=1e-12)
        )
    if isinstance(expected, list) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(_equal, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(
            _equal(actual[key], expected[key]) for key in expected
        )
    return type(actual) is type(expected) and bool(actual == expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
