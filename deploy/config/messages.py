"""Formats the errors of an invalid recipe: one line for each key."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from actors.vllm_options import PASSED_ON, advice_on
from headway.nearest_name import nearest, nearest_name

ALLOWED = {
    "bool_type": "true or false, without quotes",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text in quotes",
    "tuple_type": "a list, as in [{input}]",
    "dict_type": "a table, as in {{ key = value }}",
    "model_type": "a section of keys",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "text of the form {pattern}",
}
"""Allowed values by pydantic's type of error; formatted with the error's context."""

ALIASES = {
    "stall_seconds": "watchdog_seconds",
    "lr": "learning_rate",
    "eta": "max_staleness",
    "batch_size": "groups_per_batch",
    "num_generations": "group_size",
    "max_tokens": "max_new_tokens",
    "r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
}
"""Keys by their names in other tools, or by an old name, where spelling alone gives no hint."""

FORMS = {
    "name": 'letters, digits, ".", "_" and "-", beginning with a letter or a digit',
    "ray_address": '"local", "auto" or "host:port"',
    "checkpoint_address": "an address, as in s3://bucket/folder",
    "cores": 'core numbers, as in "0" or "2-5,8"',
}
"""The form of a string, by key; for other keys the pattern is shown."""

Location = tuple[int | str, ...]


def explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """Yield one line for each problem: key, value, what is allowed, the nearest valid key.

    `root`, the model of a whole recipe, raised the error when it validated a JSON document.
    """
    problems = [(_without_choices(problem["loc"], root), problem) for problem in error.errors()]
    choices: dict[Location, list[str]] = {}
    for location, problem in problems:
        key = ".".join(str(part) for part in location)
        match problem["type"]:
            case "extra_forbidden":
                yield f"  {key}: unknown key{_nearest(location, root)}"
            case "missing" if isinstance(location[-1], int):
                yield f"  {key}: is required; {key.rpartition('.')[0]} has too few entries"
            case "missing":
                yield f"  {key}: is required"
            case "value_error":
                message = problem["msg"].removeprefix("Value error, ")
                section = isinstance(problem["input"], Mapping)
                subject = key if section else f"{key} = {_toml(problem['input'])}"
                yield f"  {message}" if section and key in message else f"  {subject}: {message}"
            case _:
                choices.setdefault(location, []).append(_allowed(problem, location))
                same = [other["loc"] for where, other in problems if where == location]
                if same[-1] == problem["loc"]:  # the last choice of a union
                    must = " or ".join(dict.fromkeys(choices[location]))
                    hint = nearest(str(problem["input"]), re.findall("'(.*?)'", must))
                    yield f"  {key} = {_toml(problem['input'])}: must be {must}{hint}"


def _allowed(problem: ErrorDetails, location: Location) -> str:
    """Return what a value must be, by pydantic's own message if the table has none."""
    forms = [FORMS[str(part)] for part in location if part in FORMS]
    if forms and problem["type"] == "string_pattern_mismatch":
        return forms[-1]
    context = {"input": _toml(problem["input"]), **problem.get("ctx", {})}
    template = ALLOWED.get(problem["type"])
    if template is None:
        return problem["msg"].removeprefix("Input should be ")
    return template.format_map(context)


def _toml(value: Any) -> str:
    """Format a value as in a recipe, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _without_choices(location: Location, root: type[BaseModel]) -> Location:
    """Return the location without the choices of a union, which pydantic adds to it."""
    model: type[BaseModel] | None = root
    for depth, part in enumerate(location):
        if model is None:
            return location[: depth + 1] if isinstance(part, int) else location[:depth]
        if isinstance(part, str):  # a number is the place in a list of sections
            model = section_of(model, part)
    return location


def section_of(model: type[BaseModel], key: int | str) -> type[BaseModel] | None:
    """Return the model of a section; None if the key is a value, or unknown."""
    field = model.model_fields.get(str(key))
    if field is None:
        return None
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _nearest(location: Location, root: type[BaseModel]) -> str:
    """Return a hint: a key with this word here or elsewhere, a similar key, or all keys here."""
    section, name = location[:-1], str(location[-1])
    name = ALIASES.get(name, name)
    model = root
    for part in section:
        model = section_of(model, part) or model
    if any(name in (field, *field.split("_")) for field in model.model_fields):
        return nearest(name, model.model_fields)
    elsewhere: dict[str, str] = {}
    for path in sorted(key_paths(root), key=lambda path: path.count(".")):
        elsewhere.setdefault(path.rpartition(".")[2], path)
    if name in elsewhere:
        return f"; did you mean {elsewhere[name]!r}?"
    if name in PASSED_ON:
        return f"; set actors.vllm_options.{name} instead"
    if advice := advice_on(name):
        return f"; {advice}"
    if hint := nearest(name, model.model_fields):
        return hint
    if close := nearest_name(name, elsewhere):
        return f"; did you mean {elsewhere[close]!r}?"
    return f"; valid keys are {', '.join(model.model_fields)}"


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a recipe, and every section before its keys."""
    for name in model.model_fields:
        yield f"{prefix}{name}"
        section = section_of(model, name)
        if section is not None:
            yield from key_paths(section, f"{prefix}{name}.")
