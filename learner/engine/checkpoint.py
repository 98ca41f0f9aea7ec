"""Checkpoints, created atomically: a complete folder appears under its name, or none.

    capture: every rank copies  ─▶ prepare ─▶ every rank writes ─▶ finish: state, ─▶ commit ─▶ prune
             its part                         and syncs its part   checksums, rename
    (the next step waits for it)   (training goes on)

Rank 0 prepares, finishes and prunes; the caller commits the checkpoint to the broker's ledger. A
folder that was never committed is garbage, which `prune` removes when training begins. Every file
is compared with its checksum when it is loaded. None is a pickle: tensors are safetensors, the rest
is JSON.
"""

import json
import logging
import random
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from headway import clock, folder_checksums
from headway.atomic_file import sync_path, sync_tree
from headway.errors import InputError
from learner.disk_wait import make_folder, wait_for_space, write_text
from learner.engine.protocol import Trainable, TrainEngine
from learner.engine.reference import Reference

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
RANDOM_FOLDER = "optimizer/random"
"""Random state, in the optimizer's folder, which an export of the model leaves out as a whole."""
PART_CHECKSUMS = ".checksums-"
"""Prefix of the files, in an unfinished checkpoint, with the checksums that each rank computed."""
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
    weights_checksum: str = ""
    """Checksum of the weights as they were published; the ledger has it too."""
    wire_dtype: str = "as_trained"
    """The setting `weight_sync.wire_dtype` that they were published with."""
    adapter_alone: bool = False
    """True if the factors of an adapter were published, and not whole weights."""

    def checksum_as(self, dtype: str, wire_dtype: str, adapter_alone: bool) -> str | None:
        """Return the checksum of the weights in this form; None if they had another."""
        published = self.dtype, self.wire_dtype, self.adapter_alone
        alike = (dtype, wire_dtype, adapter_alone) == published
        return self.weights_checksum if alike else None


def checkpoint_path(root: Path, version: int) -> Path:
    """Return the folder of a version: `v000060`."""
    return root / f"v{version:06d}"


def prepare(root: Path, version: int) -> Path:
    """Make the temporary folder of a version; waits while the disk is full.

    What a killed process left behind is removed first.
    """
    make_folder(root)
    for leftover in [*root.glob(".v*.tmp"), *root.glob(".v*.old")]:
        _try(shutil.rmtree, leftover)
    temporary = root / f".{checkpoint_path(root, version).name}.tmp"
    make_folder(temporary, exist_ok=False)
    return temporary


def check_shared(root: Path, store: Store, rank: int, ranks: int) -> None:
    """Require that every rank sees the folder in which rank 0 keeps checkpoints. Collective.

    The ranks compare by their store, so that no model needs to be loaded before.

    Raises:
        InputError: A rank does not, such as one on another node.
    """
    if rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        name = f".seen-{secrets.token_hex(8)}"
        (root / name).touch()
        store.set("checkpoints", name)
    token = root / store.get("checkpoints").decode()
    store.set(f"checkpoints/{rank}", "seen" if token.exists() else "missing")
    blind = [store.get(f"checkpoints/{other}") for other in range(ranks)].count(b"missing")
    if rank == 0:
        token.unlink()
    if blind:
        raise InputError(
            f"{blind} of the learner's {ranks} ranks do not see {root}, where checkpoints "
            "are kept: set deploy.checkpoint_dir to a folder that all of its nodes share"
        )


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def newest_size(root: Path) -> int:
    """Return the bytes of the newest checkpoint, an estimate of the next; 0 before the first."""
    return size(max(root.glob("v*"), default=root / "none"))


def capture(
    engine: TrainEngine,
    *,
    critic: Trainable | None = None,
    reference: Reference | None = None,
) -> Callable[[Path], None]:
    """Copy this rank's part of a checkpoint and its random state to host memory. Collective.

    Returns a function that writes them durably to the folder of `prepare`, with the checksums of
    its files. It may be called in any thread while training goes on.
    """
    rank, random_state = engine.rank, json.dumps(_random_state())
    write_policy = engine.capture()
    write_critic = critic.capture() if critic is not None else None
    write_reference = reference.capture() if reference is not None and rank == 0 else None

    def write(temporary: Path) -> None:
        write_policy(temporary)
        if write_critic is not None:
            write_critic(temporary / CRITIC_FOLDER)
        if write_reference is not None:
            write_reference(temporary)
        folder = temporary / RANDOM_FOLDER
        make_folder(folder)
        write_text(folder / f"rank-{rank}.json", random_state)
        names = [name for name in folder_checksums.files_of(temporary) if _writer(name) == rank]
        checksums = folder_checksums.compute(temporary, names)
        write_text(temporary / f"{PART_CHECKSUMS}{rank}", json.dumps(checksums))
        for name in names:
            sync_path(temporary / name)

    return write


def _writer(name: str) -> int:
    """Return the rank that writes a file of a checkpoint: those of other ranks have its number."""
    numbered = re.match(r"rank-(\d+)[-.]", Path(name).name)
    return int(numbered[1]) if numbered else 0


def finish(root: Path, state: State) -> Path:
    """Complete the folder of a version, when every rank has written its part, and return it.

    A folder of this version that existed is replaced.
    """
    final = checkpoint_path(root, state.version)
    temporary = root / f".{final.name}.tmp"
    write_text(temporary / STATE_FILE, json.dumps(asdict(state), indent=1))
    checksums: dict[str, str] = {}
    for part in temporary.glob(f"{PART_CHECKSUMS}*"):
        checksums |= json.loads(part.read_text())
        part.unlink()
    others = set(folder_checksums.files_of(temporary)).difference(checksums)
    checksums |= folder_checksums.compute(temporary, sorted(others))
    write_text(temporary / folder_checksums.FILE_NAME, json.dumps(checksums, indent=1))
    sync_tree(temporary)
    _remove(final)
    temporary.rename(final)
    sync_path(root)
    return final


def save(engine: TrainEngine, root: Path, state: State, *, keep: int) -> None:
    """Write a checkpoint while training waits, and remove all but the newest `keep`. Collective."""
    everyone = torch.zeros(1)
    if engine.rank == 0:
        prepare(root, state.version)
        wait_for_space(root, newest_size(root))
    engine.sum_over_ranks(everyone)  # the folder is there
    capture(engine)(root / f".{checkpoint_path(root, state.version).name}.tmp")
    engine.sum_over_ranks(everyone)  # every rank has written
    if engine.rank == 0:
        finish(root, state)
        prune(root, newest=state.version, keep=keep, keep_seconds=0.0)


def read_state(folder: Path) -> State:
    """Read the description of a checkpoint.

    Raises:
        InputError: There is no checkpoint, or it was not written by this program.
    """
    try:
        return State(**json.loads((folder / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"no checkpoint can be read from {folder}: {error}") from error


def load(engine: TrainEngine, folder: Path, *, critic: Trainable | None = None) -> State:
    """Load a checkpoint, to go on exactly as if training had not been interrupted. Collective.

    Other numbers of ranks, ZeRO stages and dtypes than those that wrote it can load it.

    Raises:
        InputError: No checkpoint, or a damaged one.
    """
    problem = folder_checksums.damage_of(folder, part=engine.rank, parts=engine.ranks)
    if engine.sum_over_ranks(torch.tensor([float(problem is not None)])):
        raise InputError(
            f"the checkpoint {folder} cannot be loaded: {problem or 'another rank found damage'}; "
            "put the folder back from a copy"
        )
    state = read_state(folder)
    engine.load(folder)
    if critic is not None:
        critic.load(folder / CRITIC_FOLDER)
    # A rank that is new goes on with the random numbers of one that was there.
    name = f"{RANDOM_FOLDER}/rank-{engine.rank % state.ranks}.json"
    try:
        _set_random_state(json.loads((folder / name).read_text()))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(
            f"the checkpoint {folder} cannot be loaded: {name} is no random state: {error}"
        ) from error
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
    """Return the states of all random generators as JSON values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": [name, np.array(keys).tolist(), *rest],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
