"""Prompts from the data set of an environment of the library verifiers: `verifiers:ID`.

A whole row travels in the prompt's metadata to the environment of the same id. Held-out prompts are
those of its evaluation data set, where it has one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.environments.verifiers_environment import ROW, load_verifiers
from actors.errors import InputError
from actors.sources.protocol import Split
from actors.sources.row_source import RowSource
from actors.sources.rows import Read, read_rows, row_options


class VerifiersSource(RowSource):
    """Rows of an environment's data sets (a `PromptSource`).

    Args:
        name: "verifiers:ID".
        options: Keywords of the environment.
        seed: Of the shuffling.
        split: Which rows to draw.
        heldout_size: Distinct held-out prompts.

    Raises:
        InputError: The environment cannot be loaded, has no data, or rows that cannot be read.
    """

    def __init__(
        self,
        name: str,
        *,
        options: dict[str, Any],
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
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


def _read(place: str, rows: Iterable[Mapping[str, Any]]) -> Read:
    kept = (
        {
            "prompt": [
                {"role": said["role"], "content": said["content"]} for said in row["prompt"]
            ],
            "answer": _text(row.get("answer")),
            "metadata": {ROW: {key: value for key, value in row.items() if key != "prompt"}},
        }
        for row in rows
    )
    return read_rows(place, enumerate(kept, 1), row_options(place, {}))


def _text(answer: Any) -> Any:
    """What the recipe's own rewards are given; the rubric's has the type that it has."""
    return answer if isinstance(answer, str | int | float | None) else str(answer)
