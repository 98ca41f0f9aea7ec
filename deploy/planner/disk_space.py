"""The check that the disks of a run have space for what it will write.

It is a lower bound: the checkpoints that are kept and one more, since a new one is written before
an old one is deleted, and the rollouts between two of them, which a backup has too. For a resumed
run, it is what the remaining steps add to the checkpoints that are there.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.filesize import decimal

from deploy.config.run_config import RunConfig
from deploy.planner.byte_counts import checkpoint_bytes, journal_bytes, most_checkpoints
from headway.errors import InputError


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder."""
    return shutil.disk_usage(folder).free


def check_free_space(
    config: RunConfig,
    shapes: Mapping[str, tuple[int, ...]],
    folders: Mapping[str, Path],
    *,
    resumed: Path | None = None,
    free: Callable[[Path], int] = free_bytes,
) -> None:
    """Compare the free space with the least that a run of a model will need.

    Args:
        config: The recipe.
        shapes: Shapes of the model's weights, by their names.
        folders: Folders of the run that exist, by their keys in [deploy].
        resumed: The checkpoint folder of a resumed run.
        free: Returns the free bytes of the disk of a folder.

    Raises:
        InputError: Too little is free; names how much is needed for what.
    """
    folders = dict(folders)
    saved_in = next((key for key in ("checkpoint_dir", "backup_dir") if key in folders), "runs_dir")
    if resumed is not None and not resumed.is_symlink():
        saved_in = "runs_dir"
    elif resumed is not None:
        saved_in = saved_in.replace("runs_dir", "checkpoint_dir")
        folders[saved_in] = resumed.resolve()
    names = [path.name[1:] for path in resumed.glob("v*")] if resumed else []
    made = [int(name) for name in names if name.isdigit()]
    version = max(made, default=0)
    files = resumed.rglob("*") if resumed else ()
    stored = sum(path.stat().st_size for path in files if path.is_file())
    weights = sum(math.prod(shape) for shape in shapes.values())
    checkpoint = checkpoint_bytes(config.learner, weights)
    checkpoints = most_checkpoints(config, version, len(made))
    remaining = max(0, config.steps - version)
    journal = journal_bytes(config, min(remaining, config.learner.checkpoint_every))
    already = f", of which {decimal(stored)} are there" if stored else ""
    kept = (
        f"{checkpoints} checkpoint(s) of {decimal(checkpoint)}, by learner.keep_checkpoints and "
        f"checkpoint_every{already}"
    )
    rollouts = f"{decimal(journal)} of rollouts between two"
    growth = max(0, checkpoints * checkpoint - stored)
    for key, folder in folders.items():
        parts = {kept: growth} if key == saved_in else {}
        if key != "checkpoint_dir":
            parts[rollouts] = journal
        needed = sum(parts.values())
        if (left := free(folder)) < needed:
            raise InputError(
                f"{folder} has {decimal(left)} free, and the run needs about {decimal(needed)}: "
                f"{', and '.join(parts)}; free some, or set deploy.{key} to a larger disk"
            )
