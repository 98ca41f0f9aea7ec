"""The reward `reasoning_gym`: the verifier of the task that a prompt came from."""

import ast
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym as library
from reasoning_gym.utils import extract_answer


def reasoning_gym(
    prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
) -> float:
    """Return the task's own score, in most tasks from 0 to 1.

    The text in <answer>…</answer> counts, or without such tags the whole completion.

    Raises:
        ValueError: The prompt is not from a reasoning_gym source.
    """
    if "task" not in metadata or "entry" not in metadata:
        raise ValueError("the prompt is not from a source reasoning_gym:TASK")
    text = extract_answer(completion) or completion.strip()
    task = _task(metadata["task"], json.dumps(metadata["options"]))
    return float(task.score_answer(text, ast.literal_eval(metadata["entry"])))


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Any:
    """Create a data set of the task, for its verifier alone."""
    return library.create_dataset(name, seed=0, size=1, **json.loads(options))
