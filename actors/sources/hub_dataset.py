"""Prompts from a data set of Hugging Face's library `datasets`: by name, or from a folder.

The library is not installed with Headway: `pip install headway-rl[datasets]`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.protocol import Split
from actors.sources.row_source import RowSource
from actors.sources.rows import ParsedRows, read_rows, row_options

OWN_OPTIONS = ("split", "config", "heldout_split", "revision")


class DatasetSource(RowSource):
    """Rows of a data set (a `PromptSource`).

    Args:
        name: On the hub, as "openai/gsm8k", or a folder, written by `save_to_disk` or of files.
        options: `split` ("train" if not given), `config`, `revision`, `heldout_split` to hold out
            from, and those of `RowOptions`.
        seed, split, heldout_size: As in `RowSource`.

    Raises:
        InputError: The library is not installed, no such data set, or rows that are malformed.
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
        own = {key: value for key, value in options.items() if key in OWN_OPTIONS}
        others = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
        chosen = row_options(f"datasets:{name}", others)
        part, heldout_part = own.get("split", "train"), own.get("heldout_split")
        label = Path(name).name

        def read(part: str) -> ParsedRows:
            table = f"datasets:{name}[{part}]"
            return read_rows(table, enumerate(_rows(name, part, own), 1), chosen)

        super().__init__(
            (label, lambda: read(part)),
            (f"{label}_{heldout_part}", lambda: read(str(heldout_part))) if heldout_part else None,
            seed=seed,
            split=split,
            heldout_size=heldout_size,
            shard=chosen.shard,
        )


def _rows(name: str, part: str, options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"prompts.source = 'datasets:{name}' needs the library datasets, which cannot be "
            f"imported ({error}); install it with: pip install 'headway-rl[datasets]'"
        ) from None
    path = Path(name).expanduser()
    saved = any((path / mark).exists() for mark in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
            rows: Iterable[dict[str, Any]] = (
                loaded[part] if isinstance(loaded, datasets.DatasetDict) else loaded
            )
        else:
            rows = datasets.load_dataset(
                str(path) if path.exists() else name,
                options.get("config"),
                split=part,
                revision=options.get("revision"),
            )
    except Exception as error:
        raise InputError(f"datasets:{name}, split {part!r}: {error!r}") from error
    return rows
