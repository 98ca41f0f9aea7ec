"""Checks that the folder of runs can be written and has space for what a run will write.

The check is a lower bound: the checkpoints that are kept and one more, since a new one is written
before an old one is deleted, and the rollouts between two of them, which a backup has too. For a
resumed run, it is what the remaining steps add to the checkpoints that are there.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil
from rich.filesize import decimal

from deploy.config.run_config import RunConfig
from headway.errors import InputError
from learner.config.learner import LearnerConfig

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "afs", "fuse.sshfs",
     "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"}
)  # fmt: skip
"""File systems whose files several machines may write."""
TOKEN_BYTES = 13
"""Bytes of a token in the journal: id, log-probability, version (4 each), mask."""


def check_runs_dir(config: RunConfig) -> Path:
    """Return `deploy.runs_dir`, or the nearest of its parents that exists.

    Raises:
        InputError: It is a file, on a network file system, or cannot be written.
    """
    folder = _existing("deploy.runs_dir", config.deploy.runs_dir)
    if (kind := file_system(folder)) in NETWORK:
        raise InputError(
            f"deploy.runs_dir = {str(config.deploy.runs_dir)!r} is on {kind}, where the ledger's "
            "SQLite cannot work; take a local disk, and deploy.checkpoint_dir for what machines "
            "share"
        )
    return folder


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as "ext4"; "" if it is not known."""
    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    return max(above, key=lambda mount: len(mount.mountpoint)).fstype if above else ""


def check_other_dirs(config: RunConfig) -> dict[str, Path]:
    """Return the other folders of [deploy] that are set, by key, as `check_runs_dir` does."""
    folders = {
        "checkpoint_dir": config.deploy.checkpoint_dir,
        "backup_dir": config.deploy.backup_dir,
    }
    return {key: _existing(f"deploy.{key}", path) for key, path in folders.items() if path}


def backup_warning(run: Path, backup: Path) -> str | None:
    """Return a warning if a run and its backup, which may not exist, are on the same disk."""
    if not backup.exists() or run.stat().st_dev != backup.stat().st_dev:
        return None
    return f"{backup.resolve()} is on the disk of {run}, whose loss it does not outlive"


def _existing(key: str, folder: Path) -> Path:
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"{key} = {str(folder)!r}: {existing} is a file, not a folder")
    real = shutil.disk_usage(existing).total > 0  # /proc and the like hold no files
    if not (real and os.access(existing, os.W_OK | os.X_OK)):
        raise InputError(f"{key} = {str(folder)!r}: {existing} cannot be written")
    return existing


def check_free_space(
    config: RunConfig, shapes: Mapping[str, tuple[int, ...]], *, resumed: Path | None = None
) -> None:
    """Compare the free space with the least that a run of a model with these weights will need.

    `resumed` is the checkpoint folder of a resumed run.

    Raises:
        InputError: Too little is free; names how much is needed for what.
    """
    folders = {"runs_dir": check_runs_dir(config), **check_other_dirs(config)}
    saved_in = next((key for key in ("checkpoint_dir", "backup_dir") if key in folders), "runs_dir")
    if resumed is not None and not resumed.is_symlink():
        saved_in = "runs_dir"
    elif resumed is not None:
        saved_in = saved_in.replace("runs_dir", "checkpoint_dir")
        folders[saved_in] = resumed.resolve()
    parameters = sum(math.prod(shape) for shape in shapes.values())
    checkpoint = parameter_bytes(config.learner) * parameters
    every, keep = config.learner.checkpoint_every, config.learner.keep_checkpoints
    names = [path.name[1:] for path in resumed.glob("v*")] if resumed else []
    made = [int(name) for name in names if name.isdigit()]
    version = max(made, default=0)
    saves = math.ceil(config.steps / every) - version // every if version < config.steps else 0
    checkpoints = min(keep + 1, len(made) + saves)
    files = resumed.rglob("*") if resumed else ()
    stored = sum(path.stat().st_size for path in files if path.is_file())
    batches = min(max(0, config.steps - version), every)
    rollouts = batches * config.prompts.groups_per_batch * config.prompts.group_size
    journal = TOKEN_BYTES * rollouts * config.actors.max_new_tokens
    already = f", of which {decimal(stored)} are there" if stored else ""
    saved = (
        f"{checkpoints} checkpoint(s) of {decimal(checkpoint)}, by learner.keep_checkpoints and "
        f"checkpoint_every{already}"
    )
    rollouts_between = f"{decimal(journal)} of rollouts between two"
    growth = max(0, checkpoints * checkpoint - stored)
    for key, folder in folders.items():
        parts = {saved: growth} if key == saved_in else {}
        if key != "checkpoint_dir":
            parts[rollouts_between] = journal
        _require(folder, sum(parts.values()), ", and ".join(parts), key)


def _require(folder: Path, needed: int, what: str, key: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{folder} has {decimal(free)} free, and the run needs about {decimal(needed)}: "
            f"{what}; free some, or set deploy.{key} to a larger disk"
        )


def parameter_bytes(learner: LearnerConfig) -> int:
    """Return the bytes of a parameter in a checkpoint with AdamW; Muon stores less.

    A separate critic takes as much again, and a refreshed reference another copy of the weights. An
    adapter is not counted, and what it is added to is in no checkpoint.
    """
    own = learner.critic
    critic = own is not None and not own.shared and own.lora is None
    refreshed = learner.kl is not None and learner.kl.refresh_every is not None
    stepped = stepped_bytes(learner)
    parts = [(learner.lora is None, stepped), (critic, stepped), (refreshed, stepped - 12)]
    return sum(size for held, size in parts if held)


def stepped_bytes(learner: LearnerConfig) -> int:
    """Return the bytes of a trained parameter in a checkpoint.

    A checkpoint has the weights for actors, and in float32 the weights that are stepped and AdamW's
    two moments.
    """
    return 12 + (4 if learner.dtype == "float32" else 2)
