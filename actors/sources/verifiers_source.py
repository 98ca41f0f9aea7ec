"""Prompts from the data set of an environment of the library verifiers: `verifiers:ID`.

What its rubric needs of a row travels in the prompt's metadata to the environment of the same id.
"""

from typing import Any

from actors.environments.verifiers_environment import load_verifiers
from actors.errors import InputError
from actors.sources.row_source import RowSource
from actors.sources.rows import Read, read_rows, row_options
from actors.sources.source import Split


class VerifiersSource(RowSource):
    """Rows of an environment's training data set (a `PromptSource`).

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
        environment = load_verifiers(name, options, setting="prompts.source")

        def read() -> Read:
            try:
                rows = environment.get_dataset()
            except ValueError as error:
                raise InputError(f"prompts.source = {name!r}: {error}") from None
            kept = (
                {
                    "prompt": [
                        {"role": said["role"], "content": said["content"]} for said in row["prompt"]
                    ],
                    "answer": row.get("answer"),
                    "metadata": {
                        key: row[key] for key in ("example_id", "info", "task") if row.get(key)
                    },
                }
                for row in rows
            )
            return read_rows(name, enumerate(kept, 1), row_options(name, {}))

        super().__init__(
            (name.rpartition(":")[2].rpartition("/")[2], read),
            None,
            seed=seed,
            split=split,
            heldout_size=heldout_size,
            shard=(0, 1),
        )
