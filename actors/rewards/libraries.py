"""Verifiers of other libraries. They run in the sandbox, and parse with `guarded_parsing`."""

import ast
import json
import logging
from functools import cache
from itertools import product
from typing import Any

from actors.rewards.answers import required_answer
from actors.rewards.find_reward import Metadata, Verifier
from actors.sandbox.guarded_parsing import guard_eval, guard_sympy

WARM = (
    "1/2 + 3", "50\\%", "\\frac{1}{2}", "\\sqrt{2}x^2 + \\pi", "\\{1, 2\\}", "[0, 1)",
    "x = \\sin(2)", "\\begin{pmatrix}1 & 2\\\\3 & 4\\end{pmatrix}", "x \\ge 3", "x + y = 2",
)  # fmt: skip
"""Expressions that fill the caches of math-verify before a completion is read."""


def math_verify(prompt: str, answer: str | None, metadata: Metadata) -> Verifier:
    """1 where the answer that the completion gives equals the prompt's; else 0.

    Raises ValueError for an answer without one meaning.
    """
    from actors.rewards.math_answers import gold_in, is_right, read

    text = required_answer(answer)
    try:
        gold = read(gold_in(text))
    except Exception as error:  # the grammar raises many kinds
        raise ValueError(f"math_verify cannot score the answer {text!r}: {error}") from error

    return lambda completion: float(is_right(gold, completion))


def reasoning_gym(prompt: str, answer: str | None, metadata: Metadata) -> Verifier:
    """Return the task's own score, in most tasks from 0 to 1.

    The text in <answer>…</answer> counts, or without such tags the whole completion. Raises
    ValueError for a prompt of another source.
    """
    from reasoning_gym.utils import extract_answer

    task, entry = _task_of(metadata), ast.literal_eval(metadata["entry"])
    return lambda completion: float(
        task.score_answer(extract_answer(completion) or completion.strip(), entry)
    )


def preload(name: str, metadata: Metadata) -> str:
    """Import what a verifier needs before a completion; return a name of what is loaded."""
    if name == "reasoning_gym":
        _task_of(metadata)
        return f"{name}:{metadata['task']}:{json.dumps(metadata['options'])}"
    if name == "math_verify":
        _warm_math_verify()
    elif name == "json_schema":
        import jsonschema.validators  # noqa: F401
    return name


@cache
def _warm_math_verify() -> None:
    from actors.rewards.math_answers import equal, read

    guard_sympy()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it sets no deadline
    answers = [read(text) for text in WARM]
    for gold, answer in product(answers, answers):
        equal(gold, answer)


def _task_of(metadata: Metadata) -> Any:
    if "task" not in metadata or "entry" not in metadata:
        raise ValueError("the prompt is not from a source reasoning_gym:TASK")
    return _task(metadata["task"], json.dumps(metadata["options"]))


@cache
def _task(name: str, options: str) -> Any:
    """Create a data set of the task, for its verifier alone."""
    import reasoning_gym as library

    guard_sympy()
    guard_eval("reasoning_gym")
    return library.create_dataset(name, seed=0, size=1, **json.loads(options))
