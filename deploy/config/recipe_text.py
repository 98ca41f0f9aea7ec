"""Writes a recipe as TOML, so that a resolved recipe can be read, edited and run again."""

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.config.run_config import RunConfig

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Keys(Enum):
    """The keys of a recipe that its text has; those without a default always are."""

    ALL = "all"
    """Every key; one without a value, since TOML has no null, as a comment."""
    SET = "set"
    """Keys that a recipe or this machine sets, and those that differ from the default."""
    DIFFERING = "differing"
    """Keys whose value is not the default."""


def recipe_text(config: RunConfig, keys: Keys = Keys.ALL) -> str:
    """Return a recipe as TOML; with all keys, `load_recipe` reads the same recipe."""
    return "\n".join(_section(config, "", keys)).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """Format a value that is not None as TOML, on one line; a path as its text.

    Example:
        >>> toml_value({"k": 4, "names": ["a", "b"]})
        '{ k = 4, names = ["a", "b"] }'
    """
    if isinstance(value, dict):
        entries = [f"{toml_key(name)} = {toml_value(entry)}" for name, entry in value.items()]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    # A string of JSON is one of TOML but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _section(section: BaseModel, name: str, keys: Keys, *, given: bool = True) -> Iterator[str]:
    """Yield the lines of a section: its own keys first, then the sections in it.

    Without keys to write it has a heading only where it is `given` and none of those in it are.
    """
    values = section.model_dump(mode="json", exclude_none=True)
    inner = {key: value for key, value in section if isinstance(value, BaseModel)}
    own = []
    for key, field in type(section).model_fields.items():
        if key not in values:
            own += [f"# {key} is not set"] if keys is Keys.ALL else []
        elif key not in inner and _is_written(section, key, field, keys):
            own.append(f"{key} = {toml_value(values[key])}")
    if name and (own or (given and not inner) or keys is Keys.ALL):
        yield f"\n[{name}]"
    yield from own
    for key, value in inner.items():
        default = type(section).model_fields[key].default
        below = f"{name}.{key}" if name else key
        yield from _section(value, below, keys, given=not isinstance(default, BaseModel))


def _is_written(section: BaseModel, key: str, field: FieldInfo, keys: Keys) -> bool:
    if keys is Keys.ALL or field.is_required():
        return True
    if keys is Keys.SET and key in section.model_fields_set:
        return True
    return bool(getattr(section, key) != field.get_default(call_default_factory=True))


def toml_key(name: str) -> str:
    """Return one part of a dotted key as TOML, in quotes if it needs them."""
    return name if BARE_KEY.fullmatch(name) else toml_value(name)
