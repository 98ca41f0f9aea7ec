"""Prompts from the data set of an environment of the library verifiers: `verifiers:ID`.

Their metadata has the whole row; held out is its evaluation data set, where it has one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.environments.verifiers_environment import ROW, load_verifiers
from actors.sources.row_source import RowSource, Table
from actors.sources.rows import Row, RowOptions
from headway.errors import InputError


def verifiers_source(identifier: str, *, options: dict[str, Any], **order: Any) -> RowSource:
    """Open the data sets of an environment; raise InputError if one cannot be read."""
    name = f"verifiers:{identifier}"
    environment = load_verifiers(name, options, setting="source")
    try:
        training = environment.get_dataset()
    except ValueError as error:
        raise InputError(f"source = {name!r}: {error}") from None
    evaluation = environment.build_eval_dataset()
    label = name.rpartition(":")[2].rpartition("/")[2]

    def table(part: str, rows: Iterable[Mapping[str, Any]]) -> Table:
        return Table(label, name + part, lambda: enumerate(map(_row, rows), 1))

    heldout = None if evaluation is None else table("[eval]", evaluation)
    return RowSource(table("", training), heldout, RowOptions(), **order)


def _row(row: Mapping[str, Any]) -> Row:
    """Return a row with its answer as rewards of the recipe take it; the rubric reads ROW."""
    answer = row.get("answer")
    return {
        "prompt": [{"role": m["role"], "content": m["content"]} for m in row["prompt"]],
        "answer": answer if isinstance(answer, str | int | float | None) else str(answer),
        "metadata": {ROW: {key: value for key, value in row.items() if key != "prompt"}},
    }
