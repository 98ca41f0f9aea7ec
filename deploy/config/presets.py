"""Presets: the algorithm's part of a recipe, under a name. What the recipe itself says wins.

They are TOML files in `recipes/presets`, each with an account of what it is and where it is from.
"""

import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

from deploy.config.messages import nearest
from deploy.errors import InputError

PRESETS = Path(__file__).parents[1] / "recipes" / "presets"

CHOICES = ("advantage", "loss", "correction")
"""Keys of [learner] with options of their own, which go with the choice."""

WHOLE = ("overlong",)
"""Tables that are one choice: [actors.overlong] has `buffer` or `share`, never both."""


def preset_names() -> list[str]:
    """The presets there are, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_text(name: str) -> str:
    """The file of a preset.

    Raises:
        InputError: There is none of that name.
    """
    names = preset_names()
    if name not in names:
        hint = nearest(str(name), names)
        raise InputError(f"preset = {name!r} is not one of {', '.join(names)}{hint}")
    return (PRESETS / f"{name}.toml").read_text()


def with_preset(document: dict[str, Any]) -> dict[str, Any]:
    """A recipe's document, completed by the preset that it names.

    Where the recipe chooses another advantage, loss or correction than the preset, the preset's
    options of that choice are left out.

    Args:
        document: As read from TOML; not changed.

    Raises:
        InputError: There is no such preset.
    """
    if "preset" not in document:
        return document
    preset = tomllib.loads(preset_text(document["preset"]))
    said, given = document.get("learner"), preset.get("learner", {})
    for choice in CHOICES:
        if isinstance(said, dict) and said.get(choice, given.get(choice)) != given.get(choice):
            given.pop(f"{choice}_options", None)
    return _merged(preset, document)


def title(name: str) -> str:
    """The preset's full name and source: the account up to its first sentence."""
    return account(name).partition("). ")[0] + ")"


def on_demo(name: str, demo: dict[str, Any]) -> dict[str, Any]:
    """The demo's recipe without what a preset says itself, and with the demo's own models.

    The preset is only named, not filled in: what is overridden afterwards goes before it.
    """
    shared = {section: {"name": demo["name"]} for section in ("sft", "reward_model")}
    own = {"name": name, "preset": name, **shared}
    return _merged(_without(demo, tomllib.loads(preset_text(name))), own)


def account(name: str) -> str:
    """What a preset says of itself: the comment at the beginning of its file."""
    said = takewhile(lambda line: line.startswith("#"), preset_text(name).splitlines())
    return " ".join(line.removeprefix("#").strip() for line in said)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both documents as one; what is shared key by key is merged, anything else is `above`'s."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under or {}, value) if _shared(key, under, value) else value
    return merged


def _without(document: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The document without the keys that the other one sets too."""
    left = dict(document)
    for key, value in other.items():
        here = left.pop(key, None)
        if _shared(key, here, value):
            left[key] = _without(here or {}, value)
    return left


def _shared(key: str, *values: Any) -> bool:
    """Whether a key holds tables whose keys do not depend on one another."""
    return all(isinstance(value, dict) for value in values) and not (
        key.endswith("_options") or key in WHOLE
    )
