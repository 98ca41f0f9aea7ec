"""Records what a trained model folder was made from, and refuses one made with other settings."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.config.run_config import RunConfig
from deploy.errors import InputError

ORIGIN_FILE = "origin.json"
"""File in the folder of a warm start or of reward models with the settings of its making."""


def warm_start_origin(config: RunConfig) -> str:
    """Return the settings that a warm start depends on, as JSON."""
    sections = config.model_dump(mode="json", include={"seed", "model", "sft"})
    if sections["sft"] is not None:
        del sections["sft"]["name"]
    return json.dumps(sections, sort_keys=True)


def reward_model_origin(config: RunConfig) -> str:
    """Return the settings that reward models depend on, as JSON."""
    sections = config.model_dump(mode="json", include={"seed", "model", "sft", "reward_model"})
    for section in ("sft", "reward_model"):
        if sections[section] is not None:
            del sections[section]["name"]
    return json.dumps(sections, sort_keys=True)


def same_warm_starts(config: RunConfig) -> list[str]:
    """Return the names of runs whose warm start was made with the same settings."""
    origin = warm_start_origin(config)
    made = sorted(config.deploy.runs_dir.glob(f"*-sft/model/{ORIGIN_FILE}"))
    return [f.parents[1].name.removesuffix("-sft") for f in made if f.read_text() == origin]


def refuse_another_origin(folder: Path, wanted: str, remedy: str) -> None:
    """Refuse the folder of a warm start or of reward models that was made with other settings.

    `wanted` are the settings as JSON; `remedy` tells in the error how to make a folder that fits.

    Raises:
        InputError: Settings differ, or the folder has none; names those that differ.
    """
    try:
        made = json.loads((folder / ORIGIN_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} has no record of what it was made with: {error}; {remedy}"
        ) from None
    before, now = dict(_settings(made)), dict(_settings(json.loads(wanted)))
    differ = [
        f"{name} = {before.get(name, 'none')}, not {now.get(name, 'none')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differ:
        shown = "; ".join(differ[:3]) + ("; and more" if len(differ) > 3 else "")
        raise InputError(f"{folder} was made with {shown}. For this recipe, {remedy}")


def _settings(section: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value, as JSON, of every setting."""
    if not isinstance(section, dict):
        yield name, json.dumps(section)
        return
    for key, value in section.items():
        yield from _settings(value, f"{name}.{key}" if name else key)
