"""Writes a recipe as TOML, so that a resolved recipe can be read, edited and run again."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deploy.config.run_config import RunConfig

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def recipe_text(config: RunConfig) -> str:
    """Return a recipe as TOML with every default filled in; `load_recipe` reads the same recipe.

    TOML has no null: keys without a value are comments.
    """
    return "\n".join(_section(config, "")).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """Format a value that is not None as TOML, on one line; a path as its text.

    Example:
        >>> toml_value({"k": 4, "names": ["a", "b"]})
        '{ k = 4, names = ["a", "b"] }'
    """
    if isinstance(value, dict):
        entries = [f"{_key(name)} = {toml_value(entry)}" for name, entry in value.items()]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    # A string of JSON is one of TOML but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _section(section: BaseModel, name: str) -> Iterator[str]:
    """Yield the lines of a section: its own keys first, then the sections in it."""
    values = section.model_dump(mode="json", exclude_none=True)
    inner = {key: value for key, value in section if isinstance(value, BaseModel)}
    if name:
        yield f"\n[{name}]"
    for key in type(section).model_fields:
        if key not in values:
            yield f"# {key} is not set"
        elif key not in inner:
            yield f"{key} = {toml_value(values[key])}"
    for key, value in inner.items():
        yield from _section(value, f"{name}.{key}" if name else key)


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else toml_value(name)
