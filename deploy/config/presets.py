"""Presets: the algorithm part of a recipe, under a name. Keys of the recipe take precedence.

They are TOML files in `recipes/presets`; a comment at the top describes each and names its source.
"""

import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

from headway.errors import InputError
from headway.nearest_name import nearest

PRESETS = Path(__file__).parents[1] / "recipes" / "presets"

CHOICES = ("advantage", "loss", "correction")
"""Keys of [learner] whose options belong to the chosen function."""

UNMERGED = ("overlong",)
"""Tables that are taken as a whole: [actors.overlong] has `buffer` or `share`, never both."""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_text(name: str) -> str:
    """Return the text of a preset's file.

    Raises:
        InputError: There is no preset of that name.
    """
    names = preset_names()
    if name not in names:
        hint = nearest(str(name), names)
        raise InputError(f"preset = {name!r} is not one of {', '.join(names)}{hint}")
    return (PRESETS / f"{name}.toml").read_text()


def with_preset(document: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's document, as read from TOML, completed by the preset that it names.

    Where the recipe chooses another advantage, loss or correction than the preset, the preset's
    options of that choice are left out.

    Raises:
        InputError: There is no such preset.
    """
    if "preset" not in document:
        return document
    preset = tomllib.loads(preset_text(document["preset"]))
    own, defaults = document.get("learner"), preset.get("learner", {})
    for choice in CHOICES:
        default = defaults.get(choice)
        if isinstance(own, dict) and own.get(choice, default) != default:
            defaults.pop(f"{choice}_options", None)
    return _merged(preset, document)


def title(name: str) -> str:
    """Return the preset's full name and source, the beginning of its description."""
    return description(name).partition("). ")[0] + ")"


def on_demo(name: str, demo: dict[str, Any]) -> dict[str, Any]:
    """Return the demo's recipe without the keys that a preset sets, and with the demo's models.

    The preset is named and not filled in, so that overrides take precedence over it.
    """
    shared = {section: {"name": demo["name"]} for section in ("sft", "reward_model")}
    own = {"name": name, "preset": name, **shared}
    return _merged(_without(demo, tomllib.loads(preset_text(name))), own)


def description(name: str) -> str:
    """Return the description of a preset: the comment at the beginning of its file."""
    comment = takewhile(lambda line: line.startswith("#"), preset_text(name).splitlines())
    return " ".join(line.removeprefix("#").strip() for line in comment)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two documents; `above` takes precedence, and shared tables are merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under or {}, value) if _shared(key, under, value) else value
    return merged


def _without(document: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the document without the keys that the other one sets too."""
    rest = dict(document)
    for key, value in other.items():
        own = rest.pop(key, None)
        if _shared(key, own, value):
            rest[key] = _without(own or {}, value)
    return rest


def _shared(key: str, *values: Any) -> bool:
    """Return True if a key holds tables whose keys do not depend on one another."""
    return all(isinstance(value, dict) for value in values) and not (
        key.endswith("_options") or key in UNMERGED
    )
