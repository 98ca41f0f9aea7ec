"""Tasksets of the library verifiers, from 0.4 on, as agents: `environment = "verifiers:ID"`.

The library stays in an environment of its own, whose interpreter runs `verifiers_main`: its
taskset, its harness and its rewards, with the gateway as the endpoint of the model.
"""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from actors.programs.program import ProgramAgent, ProgramOptions, printed_by, program_path
from actors.rewards.process import scrubbed
from headway.options import parse_options
from headway.recipe_section import Section

MAIN = str(Path(__file__).with_name("verifiers_main.py"))
PRELOADED = ("verifiers.v1.utils.loaders", "verifiers.v1.tasksets", "openai.resources.chat")
"""Modules that every task needs; they take seconds to import."""
LIST_SECONDS = 3600.0
"""Deadline of a list of tasks, whose data may have to be fetched first."""


class TasksetOptions(ProgramOptions):
    """`actors.environment_options` of a taskset; `preload` may name its modules."""

    python: str
    """Interpreter with verifiers 0.4 or newer and the taskset."""
    config: dict[str, Any] = Field(default={})
    """The library's own section `[env]`, as { agent = { harness = { id = "null" } } }; agents run
    as subprocesses of this machine unless it says otherwise."""

    @field_validator("sandbox")
    @classmethod
    def _has_no_sandbox(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "tasksets of verifiers do not run in the sandbox, since the library installs its "
                "harnesses and writes to the home folder; `config` may name a runtime of its own"
            )
        return value


class TaskListOptions(Section):
    """`prompts.source_options` of a taskset."""

    python: str
    """As in actors.environment_options."""
    config: dict[str, Any] = Field(default={})
    """As there."""
    select: dict[str, Any] = Field(default={})
    """The library's own choice of tasks, as { include = { idx = ["0:100"] } }."""
    variables: tuple[str, ...] = ()
    """As there."""
    most: int = Field(default=10_000, ge=1)
    """Most tasks that are listed; some tasksets never end."""


def _config(name: str, options: TasksetOptions | TaskListOptions) -> str:
    """Return the library's `[env]` section for a taskset, as JSON."""
    taskset = {**options.config.get("taskset", {}), "id": name.partition(":")[2]}
    return json.dumps({**options.config, "taskset": taskset})


def load_taskset(name: str, options: dict[str, Any]) -> ProgramAgent:
    """Return the agent of `verifiers:ID`; raise InputError for what is missing or wrong."""
    chosen = parse_options(TasksetOptions, "actors.environment_options", options)
    preload = (*PRELOADED, *chosen.preload)
    command = ["python", MAIN, "play", _config(name, chosen)]
    return ProgramAgent(name, command, chosen.model_copy(update={"preload": preload}))


def list_tasks(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of `verifiers:ID`: prompt, answer, if it is a text, and the whole data.

    Raises InputError with the library's own error.
    """
    chosen = parse_options(TaskListOptions, "its options", options)
    python = program_path(chosen.python, "python")
    arguments = [_config(name, chosen), str(chosen.most), json.dumps(chosen.select)]
    failing = f"{python} cannot list the tasks of {name!r}"
    words, variables = [MAIN, "list", *arguments], scrubbed(os.environ, chosen.variables)
    printed = printed_by(python, words, variables, LIST_SECONDS, failing=failing)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
