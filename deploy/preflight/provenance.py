"""Records what a run or a trained model folder was made from: settings, program and machine.

A model folder that was made with other settings than a recipe's is refused.
"""

import json
import os
import platform
import time
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import psutil

from deploy.config.changes import changes
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.runtime import machine
from deploy.storage.atomic_folder import ORIGIN_FILE

RENDERING = {
    "environment", "environment_options", "chat_template", "chat_template_options", "stop",
}  # fmt: skip
"""Keys of `[actors]` that decide how a demonstration is rendered."""


def environment() -> dict[str, Any]:
    """Return the time, the versions of Headway and of all packages, commits, and this machine.

    `commit` is that of the checkout that Headway runs from, `folder_commit` that of the working
    directory, where the user's modules are; each is None where there is none, and ends with
    "+changes" where files differ from it.
    """
    packages = {package.name: package.version for package in distributions()}
    checkout = Path(__file__).parents[2]
    return {
        "started_at": time.time(),
        "headway": version("headway-rl"),
        "commit": _commit(checkout) if (checkout / ".git").exists() else None,
        "folder_commit": _commit(Path.cwd()),
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": machine.cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": machine.gpus(),
        },
    }


def _commit(folder: Path) -> str | None:
    commit = machine.git(folder, "rev-parse", "HEAD")
    changed = commit and machine.git(folder, "status", "--porcelain", "-uno")
    return f"{commit}+changes" if changed else commit


def warm_start_origin(config: RunConfig) -> str:
    """Return the settings that a warm start depends on, as JSON."""
    sections = config.model_dump(
        mode="json", include={"seed": True, "model": True, "sft": True, "actors": RENDERING}
    )
    if sections["sft"] is not None:
        del sections["sft"]["name"]
    return json.dumps(sections, sort_keys=True)


def reward_model_origin(config: RunConfig) -> str:
    """Return the settings that reward models depend on, as JSON."""
    section = config.model_dump(mode="json", include={"reward_model"})
    if section["reward_model"] is not None:
        del section["reward_model"]["name"]
    return json.dumps(section | json.loads(warm_start_origin(config)), sort_keys=True)


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
    differ = [
        f"{change.name} = {change.before}, not {change.after}"
        for change in changes(made, json.loads(wanted))
    ]
    if differ:
        shown = "; ".join(differ[:3]) + ("; and more" if len(differ) > 3 else "")
        raise InputError(f"{folder} was made with {shown}. For this recipe, {remedy}")
