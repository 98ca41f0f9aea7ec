"""Checkpoints, created atomically: a complete folder appears under its name, or none.

    prepare ─▶ every rank writes its part ─▶ finish: state, rename ─▶ commit ─▶ prune
               and syncs it                   and sync of the parent

Rank 0 prepares, finishes and prunes; the caller commits the checkpoint to the broker's ledger. A
folder that was never committed is garbage, which `prune` removes when training begins.
"""

import json
import logging
import random
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.disk_wait import write_file, write_whole
from learner.engine.protocol import TrainEngine, ValueEngine
from learner.errors import InputError
from learner.model.reference import Reference
from queues.runtime import clock
from queues.runtime.atomic_file import sync_path

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
RANDOM_FOLDER = "optimizer/random"
"""Random state, in the optimizer's folder, which an export of the model leaves out as a whole."""
CRITIC_FOLDER = "critic"


@dataclass(frozen=True, kw_only=True)
class State:
    """The description of a checkpoint, in `state.json`."""

    version: int
    saved_at: float
    """Seconds since the epoch."""
    optimizer_steps: int
    """Steps taken since version 0."""
    ranks: int
    """Processes that wrote it."""
    zero_stage: int
    dtype: str
    """Dtype that it was trained in; its weights are float32, but for those in the model folder."""
    cursor: str | None
    """Cursor of the prompt source at the last issue; None before the first. For people to read: a
    resumed run takes the ledger's."""
    objective_state: dict[str, float] = field(default_factory=dict)
    """Running baselines and adapted coefficients, carried from batch to batch."""
    totals: dict[str, int] = field(default_factory=dict)
    """Rollouts and tokens trained since version 0."""


def checkpoint_path(root: Path, version: int) -> Path:
    """Return the folder of a version: `v000060`."""
    return root / f"v{version:06d}"


def prepare(root: Path, version: int) -> Path:
    """Make the temporary folder of a version, and remove what a killed process left behind."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in [*root.glob(".v*.tmp"), *root.glob(".v*.old")]:
        _try(shutil.rmtree, leftover)
    temporary = root / f".{checkpoint_path(root, version).name}.tmp"
    temporary.mkdir()
    return temporary


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def newest_size(root: Path) -> int:
    """Return the bytes of the newest checkpoint, an estimate of the next; 0 before the first."""
    return size(max(root.glob("v*"), default=root / "none"))


def write_part(
    engine: TrainEngine,
    temporary: Path,
    *,
    critic: ValueEngine | None = None,
    reference: Reference | None = None,
) -> None:
    """Write this rank's part of a checkpoint and its random state, durably. Collective."""
    engine.save(temporary)
    if critic is not None:
        critic.save(temporary / CRITIC_FOLDER)
    if reference is not None and engine.rank == 0:
        reference.save(temporary)
    folder = temporary / RANDOM_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{engine.rank}.pt"
    write_file(file, lambda opened: torch.save(_random_state(), opened))
    engine.sum_over_ranks(torch.zeros(1))  # a barrier: no file appears while others are synced
    for path in [*temporary.rglob("*"), temporary]:
        sync_path(path)


def finish(root: Path, state: State) -> Path:
    """Complete the folder of a version, when every rank has written its part, and return it.

    A folder of this version that existed is replaced.
    """
    final = checkpoint_path(root, state.version)
    temporary = root / f".{final.name}.tmp"
    file = temporary / STATE_FILE
    write_whole(file, lambda: file.write_text(json.dumps(asdict(state), indent=1)))
    sync_path(file)
    sync_path(temporary)
    _remove(final)
    temporary.rename(final)
    sync_path(root)
    return final


def read_state(folder: Path) -> State:
    """Read the description of a checkpoint.

    Raises:
        InputError: There is no checkpoint, or it was not written by this program.
    """
    try:
        return State(**json.loads((folder / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"no checkpoint can be read from {folder}: {error}") from error


def load(engine: TrainEngine, folder: Path, *, critic: ValueEngine | None = None) -> State:
    """Load a checkpoint, to go on exactly as if training had not been interrupted. Collective.

    Other numbers of ranks, ZeRO stages and dtypes than those that wrote it can load it.

    Raises:
        InputError: No checkpoint, or a damaged one.
    """
    state = read_state(folder)
    # A rank that is new goes on with the random numbers of one that was there.
    file = folder / RANDOM_FOLDER / f"rank-{engine.rank % state.ranks}.pt"
    if not zipfile.is_zipfile(file):
        problem = "is damaged" if file.exists() else "is missing"
        raise InputError(
            f"the checkpoint {folder} cannot be loaded: {file.relative_to(folder)} {problem}; put "
            "the folder back from a copy"
        )
    engine.load(folder)
    if critic is not None:
        critic.load(folder / CRITIC_FOLDER)
    _set_random_state(torch.load(file, weights_only=True))
    return state


def expired(
    saved_at: Mapping[int, float], *, newest: int, keep: int, keep_seconds: float, now: float
) -> list[int]:
    """Return the versions whose checkpoints are to be removed, ascending.

    `newest` was committed last: later versions never were, and earlier versions were. Kept are the
    newest `keep` checkpoints, and those saved less than `keep_seconds` before `now`, in seconds
    since the epoch like `saved_at` by version.
    """
    committed = sorted((version for version in saved_at if version <= newest), reverse=True)
    old = [v for v in committed[keep:] if now - saved_at[v] >= keep_seconds]
    return sorted([*old, *(version for version in saved_at if version > newest)])


def prune(root: Path, *, newest: int, keep: int, keep_seconds: float) -> None:
    """Remove the checkpoints that `expired` names, when training begins and after every commit.

    A checkpoint that cannot be read or removed stays, and is logged. `newest` is 0 where none is
    committed.
    """
    saved_at = {}
    for folder in root.glob("v*"):
        try:
            state = read_state(folder)
        except InputError as error:
            log.warning("left alone: %s", error)
        else:
            saved_at[state.version] = state.saved_at
    now = clock.now()
    for version in expired(saved_at, newest=newest, keep=keep, keep_seconds=keep_seconds, now=now):
        _try(_remove, checkpoint_path(root, version))


def _try(remove: Callable[[Path], None], folder: Path) -> None:
    try:
        remove(folder)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error)


def _remove(folder: Path) -> None:
    """Remove a folder; rename it first, so that no partial folder is ever seen under its name."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        folder.rename(old)
        shutil.rmtree(old)


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(np.array(keys)), *rest],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
