"""Prompts from the data set of an environment of the library verifiers: `verifiers:ID`.

The prompt's metadata carries the whole row to the environment of the same id. Held-out prompts come
from its evaluation data set, where it has one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.environments.verifiers_environment import ROW, load_verifiers
from actors.errors import InputError
from actors.sources.row_source import RowSource
from actors.sources.rows import ParsedRows, read_rows, row_options


def verifiers_source(identifier: str, *, options: dict[str, Any], **order: Any) -> RowSource:
    """Open the data sets of an environment, built with the options, as a source.

    Raises:
        InputError: The environment cannot be loaded, has no data, or rows that cannot be read.
    """
    name = f"verifiers:{identifier}"
    environment = load_verifiers(name, options, setting="source")
    try:
        training = environment.get_dataset()
    except ValueError as error:
        raise InputError(f"source = {name!r}: {error}") from None
    evaluation = environment.build_eval_dataset()
    label = name.rpartition(":")[2].rpartition("/")[2]
    return RowSource(
        (label, lambda: _read(name, training)),
        None if evaluation is None else (label, lambda: _read(f"{name}[eval]", evaluation)),
        shard=(0, 1),
        **order,
    )


def _read(table: str, rows: Iterable[Mapping[str, Any]]) -> ParsedRows:
    kept = (
        {
            "prompt": [
                {"role": message["role"], "content": message["content"]}
                for message in row["prompt"]
            ],
            "answer": _text(row.get("answer")),
            "metadata": {ROW: {key: value for key, value in row.items() if key != "prompt"}},
        }
        for row in rows
    )
    return read_rows(table, enumerate(kept, 1), row_options(table, {}))


def _text(answer: Any) -> Any:
    """Return the answer as rewards of the recipe take it; the rubric reads the row itself."""
    return answer if isinstance(answer, str | int | float | None) else str(answer)
