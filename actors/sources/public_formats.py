"""Columns that public data sets use: where a row has its prompt and its answer.

Nothing is guessed while rows are read; a refused row is answered with the options that read it.
"""

import json
from collections.abc import Mapping
from typing import Any

MESSAGES = "messages"
"""Column of conversations."""
PROMPTS = ("prompt", "problem", "question", "query", "instruction", "input", "text",
           "context_messages", MESSAGES)  # fmt: skip
"""Columns of prompts, the likeliest first, in small letters."""
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "expected_answer", "final_answer",
           "gold_answer", "gold_standard_solution", "label", "target", "solution", "info.answer",
           "info.ground_truth", "verification_info.ground_truth", "extra_info.answer",
           "extra_info.ground_truth")  # fmt: skip
"""Columns of answers, the likeliest first."""


def field_of(row: Any, path: str) -> Any:
    """Return a field of a row, or one within it as in `info.answer`; None if there is none.

    Fields within a text are those of its JSON.
    """
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            return None
    if not isinstance(row, Mapping):
        return None
    name, dot, rest = path.partition(".")
    return row[path] if path in row else field_of(row.get(name), rest) if dot else None


def options_that_read(row: Mapping[str, Any], prompt: str, answer: str) -> dict[str, str]:
    """Return the options by which the columns of a row may be read.

    `prompt` and `answer` are the paths that are set, which stay where the row has them.
    """
    names = {name.lower(): name for name in row}
    prompts = (prompt, *(names.get(name, name) for name in PROMPTS))
    prompt_path = next((name for name in prompts if field_of(row, name)), prompt)
    answers = (answer, *(names.get(path, path) for path in ANSWERS))
    fitting = (path for path in answers if isinstance(field_of(row, path), str | int | float))
    answer_path = next(fitting, answer)
    options = {"prompt_field": prompt_path, "answer_field": answer_path}
    return {option: path for option, path in options.items() if path not in (prompt, answer)}
