"""Checks that the folders of a run can be written, on file systems that can hold them."""

import os
import shutil
from pathlib import Path

import psutil

from deploy.config.run_config import RunConfig
from headway.errors import InputError

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "afs", "fuse.sshfs",
     "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"}
)  # fmt: skip
"""File systems whose files several machines may write."""


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


def check_run_folders(config: RunConfig) -> dict[str, Path]:
    """Return the folders of [deploy] that are set, by key, as `check_runs_dir` returns its own.

    Raises:
        InputError: One of them is a file, or cannot be written.
    """
    keys = ("checkpoint_dir", "backup_dir")
    paths = {key: getattr(config.deploy, key) for key in keys}
    others = {key: _existing(f"deploy.{key}", path) for key, path in paths.items() if path}
    return {"runs_dir": check_runs_dir(config), **others}


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as "ext4"; "" if it is not known."""
    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    return max(above, key=lambda mount: len(mount.mountpoint)).fstype if above else ""


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
