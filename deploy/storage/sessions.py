"""The sessions of a run: the recipe, program and machine that each began with.

A session is the time from a `headway run` or `headway resume` to its end. A run goes on with some
changes of its recipe (`deploy.config.changes`), made in its folder or by `--set`. The ledger has
every session that came as far as its broker; `sessions.jsonl` is a copy for people to read.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from deploy.config.changes import Change, changes, rule_of
from deploy.config.run_config import RunConfig
from deploy.storage.jsonl import rewrite_rows
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from headway.user_code import look_in
from learner.ranks.spec import EarlierSession
from queues.config import ONLY_RAISED, QueuesConfig
from queues.readers.open_run import open_ledger
from queues.storage.ledger_schema import sessions_of

FILE = "sessions.jsonl"


def begin_session(
    directory: RunDirectory, config: RunConfig, environment: Mapping[str, Any], *, version: int
) -> str:
    """Write down that a session begins at a version; return its row as JSON, for the broker.

    `config` is the recipe of the folder, with the cores that were chosen for this machine;
    `environment` is that of `deploy.runtime.environment`.
    """
    rows = read_sessions(directory)
    changed = changes(rows[-1]["recipe"], config.settings()) if rows else []
    described = list(map(str, changed))
    row = {"version": version, **environment, "changes": described, "recipe": config.settings()}
    rewrite_rows(directory.path / FILE, [*rows, row])
    return json.dumps(row)


def read_sessions(directory: RunDirectory, last: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a run's sessions, oldest first, to that of the batch of version `last`.

    They are from the ledger; none without one.
    """
    if not directory.ledger.exists():
        return []
    with open_ledger(directory.path, verify=False) as database:
        rows = sessions_of(database)
    return [row for row in rows if last is None or row["version"] <= last]


def resumed_recipe(
    directory: RunDirectory, overrides: Sequence[str]
) -> tuple[RunConfig, list[Change]]:
    """Return the recipe in a run's folder with overrides, and how it differs from the last session.

    Raises InputError that names each change with which the run cannot go on, and why.
    """
    config, sessions = directory.config(overrides), read_sessions(directory)
    look_in(config.deploy.code_dir)
    before = sessions[-1]["recipe"] if sessions else directory.config().settings()
    if config.learner.cores is None:
        before["learner"]["cores"] = None  # they were chosen for the machine of that session
    changed = changes(before, config.settings())
    renamed = config.name == directory.path.name  # the folder was copied or renamed
    refused = [
        f"{change}: {reason}"
        for change in changed
        if (reason := change.refusal) is not None and not (change.name == "name" and renamed)
    ]
    eta, earlier = config.queues.bound, QueuesConfig.model_validate(before["queues"]).bound
    if eta < earlier and not any("queues." in text for text in refused):
        refused.append(f"queues.max_staleness: η {earlier} → {eta}: {ONLY_RAISED.lowering_refusal}")
    if any(override.partition("=")[0].strip() == "deploy.runs_dir" for override in overrides):
        refused.append(f"deploy.runs_dir: {rule_of('deploy.runs_dir').refusal}")
    if refused:
        raise InputError(
            f"{directory.path.name} cannot go on with\n  "
            + "\n  ".join(refused)
            + f"\nundo it, by --set or in {directory.recipe_file}, or start a run of its own: "
            f"headway run {directory.recipe_file} --set name=…\nwhat can change is marked in the "
            "keys of deploy/docs/keys.md: steps, learner.learning_rate, learner.ranks, "
            "actors.count, all of [weight_sync] and more"
        )
    return config, changed


def last_recipe(directory: RunDirectory, last: int | None = None) -> RunConfig | None:
    """Return the recipe of the last session, or of that of a batch; None before the first."""
    rows = read_sessions(directory, last)
    return _recipe(directory, rows[-1]["recipe"]) if rows else None


def earlier_sessions(
    directory: RunDirectory, config: RunConfig, *, last: int | None = None
) -> tuple[EarlierSession, ...]:
    """Return the sessions before the last one, or before that of a version, for a learner.

    Each is `config`, which is that session's, with what batches were trained with before.
    """
    sessions = []
    for row, following in pairwise(read_sessions(directory, last)):
        recipe = _recipe(directory, row["recipe"])
        learner = config.objective.stepping_as(recipe.objective)
        sessions.append(EarlierSession(following["version"], learner, recipe.steps))
    return tuple(sessions)


def _recipe(directory: RunDirectory, recipe: Mapping[str, Any]) -> RunConfig:
    deploy = {**recipe["deploy"], "runs_dir": str(directory.path.parent)}
    return RunConfig.model_validate_json(json.dumps({**recipe, "deploy": deploy}), strict=True)
