"""Reads recipes: a TOML file or a shipped one, its preset, and settings given as key=value.

Presets are the algorithm part of a recipe, under a name: TOML files in recipes/presets; a comment
at the top describes each and names its source. Keys of the recipe take precedence.
"""

import csv
import json
import tomllib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deploy.config.devices import for_this_machine
from deploy.config.messages import explain
from deploy.config.recipe_text import Keys, recipe_text
from deploy.config.run_config import RunConfig
from headway.clean_text import PASSWORD, without_known_secrets, without_secrets
from headway.errors import InputError
from headway.nearest_name import nearest
from learner.config.lora import with_stored_form
from learner.config.optimizer import OptimizerConfig

SHIPPED_RECIPES = Path(__file__).parents[1] / "recipes"
PRESETS = SHIPPED_RECIPES / "presets"

CHOICES = ("advantage", "loss", "correction")
"""Keys of [learner] whose options belong to the chosen function."""

UNMERGED = ("overlong",)
"""Tables that are taken as a whole: [actors.overlong] has `buffer` or `share`, never both."""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_text(name: str) -> str:
    """Return the text of a preset's file; raise InputError if there is none of that name."""
    names = preset_names()
    if name not in names:
        hint = nearest(str(name), names)
        raise InputError(f"preset = {name!r} is not one of {', '.join(names)}{hint}")
    return (PRESETS / f"{name}.toml").read_text()


def with_preset(document: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's document, as read from TOML, completed by the preset that it names.

    Where the recipe chooses another advantage, loss or correction than the preset, the preset's
    options of that choice are left out. Raises InputError if there is no such preset.
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


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, complete and validate a recipe.

    Args:
        recipe: Path of a TOML file, the name of a shipped recipe (`demo`), or the name of a preset,
            which stands for the demo's task and warm start with that preset.
        overrides: `key=value` with dotted keys, whose parts may be quoted; values are TOML, or else
            plain strings.

    Raises:
        InputError: The recipe is not valid; has one line for each problem.
    """
    return completed(read_recipe(recipe, overrides), recipe)


def short_text(config: RunConfig) -> str:
    """Return a recipe for this machine as TOML, with the keys that differ from the defaults.

    Read again and completed for this machine, it is the same recipe: a preset, or a section that
    another completes, may need keys that have their default value too.
    """
    for keys in (Keys.DIFFERING, Keys.SET):
        text = recipe_text(config, keys)
        try:
            read = for_this_machine(completed(tomllib.loads(text), config.name))
        except InputError:
            continue
        if read == config:
            return text
    return recipe_text(config)


def completed(document: dict[str, Any], recipe: str) -> RunConfig:
    """Complete and validate the document of a recipe; `recipe` names it in messages.

    Raises InputError, with one line for each problem.
    """
    document = _with_critic(with_preset(document))
    for section in (document, document.get("learner")):
        _fill_in_adapters(section)
    try:
        return RunConfig.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        problems = "\n".join(explain(error, RunConfig))
        raise InputError(f"recipe {recipe}:\n{problems}") from None


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of a recipe as they are written, without secrets, not completed."""
    document = _read(recipe)
    for setting in overrides:
        override(document, setting)
    if secrets := [*_secrets(document)]:
        raise InputError(f"recipe {recipe}:\n" + "\n".join(secrets))
    return document


def shipped_names() -> list[str]:
    """Return the names of the shipped recipes and of the presets."""
    return sorted(path.stem for path in SHIPPED_RECIPES.glob("*.toml")) + preset_names()


def _secrets(value: Any, key: str = "") -> Iterator[str]:
    """Yield a line for each text of a recipe that has a secret, which every run would store."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _secrets(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for part in value:
            yield from _secrets(part, key)
    elif isinstance(value, str):
        if (shown := without_known_secrets(value)) != value:
            yield f"{key} = {shown!r} has the value of a secret; a recipe may have its name only"
        elif PASSWORD.search(value):
            yield (
                f"{key} = {without_secrets(value)!r} is an address with a password; a recipe may "
                "have the name of an environment variable instead, such as key_variable"
            )


def _with_critic(document: dict[str, Any]) -> dict[str, Any]:
    """Fill in the optimizer settings that [learner.critic] leaves out from those of [learner]."""
    learner = document.get("learner")
    if not isinstance(learner, dict) or not isinstance(learner.get("critic"), dict):
        return document
    shared = {name: learner[name] for name in OptimizerConfig.model_fields if name in learner}
    return {**document, "learner": {**learner, "critic": {**shared, **learner["critic"]}}}


def _fill_in_adapters(section: Any) -> None:
    """Complete the sections `lora` one level below a section in place."""
    for part in section.values() if isinstance(section, dict) else ():
        if isinstance(part, dict) and "lora" in part:
            part["lora"] = with_stored_form(part["lora"])


def _read(recipe: str) -> dict[str, Any]:
    path = Path(recipe)
    shipped = SHIPPED_RECIPES / f"{recipe}.toml"
    if not path.exists() and shipped.exists():
        path = shipped
    elif not path.exists() and recipe in preset_names():
        return on_demo(recipe, _read("demo"))
    if path.is_dir():
        raise InputError(f"recipe {recipe!r} is a folder and cannot be read; name a TOML file")
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        names = shipped_names()
        raise InputError(
            f"no recipe {recipe!r}: neither a file nor one of {', '.join(names)}"
            f"{nearest(recipe, names)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {recipe!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {recipe!r} is not TOML: {error}") from None


def override(document: dict[str, Any], setting: str) -> None:
    """Apply one `key=value` in place."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {setting!r}: write key=value, as in learner.learning_rate=1e-6")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    lines = key.strip().replace("'", '"').splitlines()
    *sections, last = next(csv.reader(lines, delimiter="."))
    if len(lines) > 1 or "\n" in text or not all((*sections, last)):
        raise InputError(f"--set {setting!r}: write one key=value, the key's parts not empty")
    table = document
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {setting!r}: {section!r} is a value, not a section")
    table[last] = value
