"""Checkpoints: a complete folder appears at once, or not at all.

Written into a temporary folder, synced, renamed, and only then committed by the caller (a row in
the broker's ledger). A folder without its row is garbage.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.engine import TrainEngine

OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "state.json"
"""Beside the weights: the version, and what the updater carries between batches."""


def checkpoint_path(root: Path, version: int) -> Path:
    """The folder of a version: `v000060`."""
    return root / f"v{version:06d}"


def save_checkpoint(
    engine: TrainEngine, root: Path, version: int, state: Mapping[str, Any]
) -> Path:
    """Saves model, tokenizer, optimizer and state of a version, durably.

    Args:
        engine: What is saved.
        root: Folder of all checkpoints; created if missing.
        version: Names the folder; one that exists is replaced.
        state: JSON-serialisable.

    Returns:
        The finished folder.
    """
    final = checkpoint_path(root, version)
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    engine.save_model(temporary)
    engine.save_optimizer(temporary / OPTIMIZER_FOLDER)
    (temporary / STATE_FILE).write_text(json.dumps({"version": version, **state}))
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    _sync(root)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
