"""Columns that public data sets use: where a row has its prompt and its answer.

Nothing is guessed while rows are read; a refused row is answered with the options that read it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

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
FinalAnswer = Literal["boxed", "####"]
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(\w|\\\w+))")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


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


def final_answer(text: str, form: FinalAnswer) -> str:
    r"""Return what is in the last \boxed{} of a solution, or what follows its last ####.

    Commas between thousands after #### are left out. Raises ValueError without any.
    """
    if form == "####":
        _, mark, after = text.rpartition(form)
        if not mark or not after.strip():
            raise ValueError("has no #### with an answer after it")
        return _THOUSANDS.sub("", after.strip())
    boxes = [*_BOXED.finditer(text)]
    if boxes and boxes[-1][1]:
        return boxes[-1][1]
    depth, start = 1, boxes[-1].end() if boxes else len(text)
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if not depth:
            return text[start:end].strip()
    raise ValueError(r"has no \boxed{} that is closed")


def options_that_read(row: Mapping[str, Any], prompt: str, answer: str) -> dict[str, str]:
    """Return the options by which the columns of a row may be read.

    `prompt` and `answer` are the paths that are set, which stay where the row has them.
    """
    names = {name.lower(): name for name in row}
    prompts = (prompt, *(names.get(name, name) for name in PROMPTS))
    found_prompt = next((name for name in prompts if field_of(row, name)), prompt)
    answers = (answer, *(names.get(path, path) for path in ANSWERS))
    fitting = (path for path in answers if isinstance(field_of(row, path), str | int | float))
    found_answer = next(fitting, answer)
    text = field_of(row, found_answer)
    options = {}
    if found_prompt != prompt:
        options["prompt_field"] = found_prompt
    if found_answer != answer:
        options["answer_field"] = found_answer
    if isinstance(text, str) and ("####" in text or _BOXED.search(text)):
        options["final_answer"] = "####" if "####" in text else "boxed"
    return options
