"""Rewards by the verifiers of other libraries, each imported when it is first called."""

import ast
import json
from functools import lru_cache
from typing import Any

from actors.rewards.answers import required_answer
from actors.rewards.registry import Metadata


def math_verify(prompt: str, completion: str, answer: str | None, metadata: Metadata) -> float:
    """1 where the last expression of the completion equals the answer; else 0.

    The caller sets the deadline: math-verify's own deadlines need the main thread.

    Raises:
        ValueError: The prompt has no answer, or one that holds no expression.
    """
    from math_verify import parse, verify

    gold = parse(required_answer(answer), parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(prompt: str, completion: str, answer: str | None, metadata: Metadata) -> float:
    """Return the task's own score, in most tasks from 0 to 1.

    The text in <answer>…</answer> counts, or without such tags the whole completion.

    Raises:
        ValueError: The prompt is not from a reasoning_gym source.
    """
    from reasoning_gym.utils import extract_answer

    if "task" not in metadata or "entry" not in metadata:
        raise ValueError("the prompt is not from a source reasoning_gym:TASK")
    text = extract_answer(completion) or completion.strip()
    task = _task(metadata["task"], json.dumps(metadata["options"]))
    return float(task.score_answer(text, ast.literal_eval(metadata["entry"])))


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Any:
    """Create a data set of the task, for its verifier alone."""
    import reasoning_gym as library

    return library.create_dataset(name, seed=0, size=1, **json.loads(options))
