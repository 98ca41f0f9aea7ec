"""Prompts from a taskset of the library verifiers: `verifiers:ID`; their metadata has the task."""

from typing import Any

from actors.programs.verifiers_taskset import list_tasks
from actors.sources.row_source import RowSource, Table
from actors.sources.rows import RowOptions

TASK = "verifiers"
"""Key of a task's whole data in the metadata of its prompt, as `verifiers_main` reads it."""


def verifiers_source(identifier: str, *, options: dict[str, Any], **order: Any) -> RowSource:
    """Open the tasks of a taskset; raise InputError if they cannot be listed."""
    name = f"verifiers:{identifier}"
    rows = [
        {"prompt": task["prompt"], "answer": task.get("answer"), "metadata": {TASK: task["data"]}}
        for task in list_tasks(name, options)
    ]
    label = identifier.rpartition("/")[2]
    return RowSource(Table(label, name, lambda: enumerate(rows, 1)), None, RowOptions(), **order)
