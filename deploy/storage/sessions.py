"""The sessions of a run: the recipe, program and machine that each began with.

A session is the time from a `headway run` or `headway resume` to its end.
"""

import json
from collections.abc import Mapping
from typing import Any

from deploy.config.changes import APPLIED, Change, changes
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.storage.run_directory import RunDirectory

FILE = "sessions.jsonl"


def begin_session(
    directory: RunDirectory, config: RunConfig, environment: Mapping[str, Any], *, version: int
) -> None:
    """Record that a session begins at a version, in an environment (`provenance.environment`).

    `config` is the recipe of the folder, with the cores that were chosen for this machine.
    """
    row = {"version": version, **environment, "recipe": settings(config)}
    directory.rewrite(FILE, [*directory.rows(FILE), row])


def recipe_changes(directory: RunDirectory, config: RunConfig) -> list[Change]:
    """Return how the recipe in a run's folder differs from the one of its last session.

    Raises:
        InputError: The run cannot go on with a change; names each, and what can be changed.
    """
    sessions = directory.rows(FILE)
    if not sessions:
        return []
    before = sessions[-1]["recipe"]
    if config.learner.cores is None:
        before["learner"]["cores"] = None  # they were chosen for the machine of that session
    edits = changes(before, settings(config))
    refused = [str(edit) for edit in edits if not edit.applied]
    if config.steps < before["steps"]:
        refused.append(
            f"steps = {config.steps}, was {before['steps']}: a run can be made longer, and stopped "
            "at any step by Ctrl-C"
        )
    if refused:
        raise InputError(
            f"{directory.recipe_file} was edited, and the run cannot go on with\n  "
            + "\n  ".join(refused)
            + f"\nundo this, or start a run of its own with it: headway run "
            f"{directory.recipe_file} --set name=…\nchanges that a run goes on with: "
            + ", ".join(APPLIED)
        )
    return edits


def recipe_at(directory: RunDirectory, version: int) -> RunConfig:
    """Return the recipe of the session that trained the batch of a version."""
    began = [row["recipe"] for row in directory.rows(FILE) if row["version"] <= version]
    if not began:
        return directory.config()
    recipe = began[-1]
    deploy = {**recipe["deploy"], "runs_dir": str(directory.path.parent)}
    return RunConfig.model_validate_json(json.dumps({**recipe, "deploy": deploy}), strict=True)


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a recipe but `deploy.runs_dir`, since a run may be moved."""
    return config.with_model_names().model_dump(mode="json", exclude={"deploy": {"runs_dir"}})
