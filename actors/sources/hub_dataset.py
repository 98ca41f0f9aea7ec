"""Prompts from a data set of Hugging Face's library `datasets`: by name, or from a folder.

The library is not installed with Headway: `pip install headway-rl[datasets]`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.row_source import RowSource, Table
from actors.sources.rows import read_rows, row_options

OWN_OPTIONS = ("split", "config", "heldout_split", "revision")


def dataset_source(name: str, *, options: dict[str, Any], **order: Any) -> RowSource:
    """Open a data set as a source.

    Args:
        name: On the hub, as "openai/gsm8k", or a folder, written by `save_to_disk` or of files.
        options: `split` ("train" if not given), `config`, `revision`, `heldout_split` to hold out
            from, and those of `RowOptions`.
        **order: As in `load_source`.

    Raises:
        InputError: The library is not installed, no such data set, or rows that are malformed.
    """
    own = {key: value for key, value in options.items() if key in OWN_OPTIONS}
    others = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    chosen = row_options(f"datasets:{name}", others)
    label = Path(name).name

    def table(label: str, part: str) -> Table:
        table_name = f"datasets:{name}[{part}]"
        return label, lambda: read_rows(table_name, enumerate(_rows(name, part, own), 1), chosen)

    heldout_part = own.get("heldout_split")
    return RowSource(
        table(label, own.get("split", "train")),
        table(f"{label}_{heldout_part}", heldout_part) if heldout_part else None,
        shard=chosen.shard,
        **order,
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
