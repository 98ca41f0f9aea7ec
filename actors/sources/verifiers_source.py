"""Prompts from the data set of an environment of the library verifiers: `verifiers:ID`.

The prompt's metadata carries the whole row to the environment of the same id. Held-out prompts come
from its evaluation data set, where it has one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.environments.verifiers_environment import ROW, load_verifiers
from actors.errors import InputError
from actors.sources.protocol import Split
from actors.sources.row_source import RowSource
from actors.sources.rows import ParsedRows, read_rows, row_options


class VerifiersSource(RowSource):
    """Rows of an environment's data sets (a `PromptSource`).

    Args:
        identifier: Id of the environment.
        options: Keywords of the environment.
        seed, split, heldout_size: As in `RowSource`.

    Raises:
        InputError: The environment cannot be loaded, has no data, or rows that cannot be read.
    """

    def __init__(
        self,
        identifier: str,
        *,
        options: dict[str, Any],
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        name = f"verifiers:{identifier}"
        environment = load_verifiers(name, options, setting="source")
        try:
            training = environment.get_dataset()
        except ValueError as error:
            raise InputError(f"source = {name!r}: {error}") from None
        evaluation = environment.build_eval_dataset()
        label = name.rpartition(":")[2].rpartition("/")[2]
        super().__init__(
            (label, lambda: _read(name, training)),
            None if evaluation is None else (label, lambda: _read(f"{name}[eval]", evaluation)),
            seed=seed,
            split=split,
            heldout_size=heldout_size,
            shard=(0, 1),
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
