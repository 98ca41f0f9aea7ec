"""The reward of programs: what passes, what does not, and what a cheating program cannot do."""

import asyncio

import pytest
from sandboxes import needs_sandbox

from actors.errors import RewardFailed
from actors.rewards.code import code, read_tests
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import check_scorable, load_rewards
from headway.errors import InputError
from queues.records import Prompt

ADD = ["assert add(1, 2) == 3", {"call": "add(-1, 1)", "result": 0}]
GREET = [{"stdin": "Ada\n", "stdout": "hello Ada\n"}, {"stdin": "Bob\n", "stdout": "hello Bob"}]


def score(completion, tests, **options):
    return code("", completion, None, {"tests": tests, "finish_reason": "stop"}, **options)


@needs_sandbox
@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", ADD, 1.0),
        ("def add(a, b): return 3", ADD, 0.0),
        ("def add(a, b) return", ADD, 0.0),
        ("", ADD, 0.0),
        ("print('hello', input())", GREET, 1.0),
        ("print('hello Ada')", GREET, 0.0),
        ("print('hello', input()); raise SystemExit(1)", GREET, 0.0),
        ("def f(): return {'a': (1, 2.0)}", [{"call": "f()", "result": {"a": [1, 2]}}], 1.0),
        ("def f(): return 0.1 + 0.2", ["assert f() == 0.3"], 1.0),
        ("def f(): return True", ["assert f() == 1"], 0.0),
        ("def f(): return {3, 1}", ["assert f() == {1, 3}"], 1.0),
        ("def f(): return object()", ["assert f() == 1"], 0.0),
    ],
)
def test_a_program_is_worth_what_its_tests_say(completion, tests, expected):
    assert score(completion, tests) == expected


@needs_sandbox
@pytest.mark.parametrize(
    "cheat",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "class Same:\n    def __eq__(self, other): return True\ndef add(a, b): return Same()",
        "import sys, json\njson.dumps = lambda *a, **k: '[true]'\ndef add(a, b): return 1",
        "import sys\nfor _ in range(9): print('[3]', file=sys.__stdout__)",
        "import gc\ndef add(a, b): return next(o for o in gc.get_objects() if 'result' in o)",
        "while True: pass",
        "import os\nwhile True: os.write(1, b'[3]\\n' * 1000)",
    ],
)
def test_a_program_that_cheats_gets_nothing(cheat):
    assert score(cheat, ADD, seconds=3.0) == 0.0


@needs_sandbox
def test_a_share_of_the_tests_is_counted_where_it_is_asked_for():
    assert score("def add(a, b): return 3", ADD, score="share") == 0.5
    assert score("print('hello Ada')", GREET, score="share") == 0.5


@needs_sandbox
def test_time_is_for_all_tests_together():
    program = (
        "import time\nname = input()\ntime.sleep(60 if name == 'Ada' else 0)\nprint('hello', name)"
    )
    assert score(program, GREET, score="share", seconds=1.0) == 0.0


def test_literals_of_tests_become_what_the_sandbox_answers():
    (result,) = read_tests(["assert f(1) == {1: (2, {4, 3}), None: [True, 0.5, 'a']}"])
    assert result == ("f(1)", {"1": [2, [3, 4]], "null": [True, 0.5, "a"]})


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "must be a list"),
        ([], "must be a list"),
        ([{"stdin": "a"}], "must be an object with stdin and stdout"),
        (["assert add(1, 2)"], "cannot be judged outside the sandbox"),
        (["assert f(1) == g(2)"], "cannot be judged outside the sandbox"),
        (["assert f(1) == {(1, 2): 3}"], "cannot be judged outside the sandbox"),
        (["assert f(1) == b'ab'"], "cannot be judged outside the sandbox"),
        (["assert f(1) == {1, 'a'}"], "cannot be judged outside the sandbox"),
        (["assert f(1) == [1j]"], "cannot be judged outside the sandbox"),
        (["print(1)"], "cannot be judged outside the sandbox"),
        ([3], "must be an object"),
    ],
)
def test_tests_that_cannot_be_read_are_errors_before_the_run_and_failures_in_it(tests, message):
    with pytest.raises(ValueError, match=message):
        score("def add(a, b): return a + b", tests)
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"tests": tests})
    with pytest.raises(InputError, match=message):
        check_scorable(["code"], [prompt])


@needs_sandbox
def test_it_is_one_reward_among_others_and_fails_like_them():
    pool = RewardPool(processes=1)
    rewards = load_rewards(
        ["code", "tags"], pool=pool, code_execution="sandbox", options={"code": {"score": "share"}}
    )
    prompt = Prompt(prompt_id="a/0/0", text="?", metadata={"tests": ADD})
    result = asyncio.run(rewards.score(prompt, "def add(a, b): return a + b"))
    assert result == (1.0, {"code": 1.0, "tags": 0.0}, ())
    with pytest.raises(RewardFailed, match="must be a list"):
        asyncio.run(rewards.score(Prompt(prompt_id="b/0/0", text="?"), "pass"))
    pool.close()
