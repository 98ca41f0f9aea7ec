"""Whether the folder of runs can be written and holds what a run will write.

Checked at the start is a lower bound: the checkpoints that are kept and one more, since the new one
is written before an old one may go, and the rollouts between two of them. A disk that is full later
makes broker, learner and recorder wait for room (`queues.room`); what else meets it ends the run.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from deploy.config import RunConfig
from deploy.errors import InputError
from learner.config import LearnerConfig

TOKEN_BYTES = 13
"""Of a token in the journal: id, log-probability, version (4 each), mask."""


def check_runs_dir(config: RunConfig) -> Path:
    """The nearest folder that exists of `deploy.runs_dir`.

    Raises:
        InputError: It is a file, or cannot be written.
    """
    runs_dir = config.deploy.runs_dir.expanduser().absolute()
    there = next(path for path in (runs_dir, *runs_dir.parents) if path.exists())
    if not there.is_dir():
        raise InputError(f"deploy.runs_dir = {str(runs_dir)!r}: {there} is a file, not a folder")
    real = shutil.disk_usage(there).total > 0  # /proc and its like hold no files
    if not (real and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"deploy.runs_dir = {str(runs_dir)!r}: {there} cannot be written")
    return there


def check_room(config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the free space with the least that the run will need.

    Args:
        config: The recipe.
        shapes: Of the model's weights.

    Raises:
        InputError: Too little is free; says how much is needed for what.
    """
    there = check_runs_dir(config)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    checkpoint = parameter_bytes(config.learner) * parameters
    saves = math.ceil(config.steps / config.learner.checkpoint_every)
    checkpoints = min(config.learner.keep_checkpoints + 1, saves)
    batches = min(config.steps, config.learner.checkpoint_every)
    rollouts = batches * config.prompts.groups_per_batch * config.prompts.group_size
    journal = TOKEN_BYTES * rollouts * config.actors.max_new_tokens
    free = shutil.disk_usage(there).free
    needed = checkpoints * checkpoint + journal
    if free < needed:
        raise InputError(
            f"{there} has {_size(free)} free, and the run needs about {_size(needed)}: "
            f"{checkpoints} checkpoint(s) of {_size(checkpoint)}, as learner.keep_checkpoints and "
            f"checkpoint_every say, and {_size(journal)} of rollouts between two; free some, or "
            "set deploy.runs_dir to a larger disk"
        )


def parameter_bytes(learner: LearnerConfig) -> int:
    """Bytes that a parameter takes in a checkpoint with AdamW; Muon has a mean less of matrices.

    The weights for actors; again for DeepSpeed, unless ZeRO 3 has them in its master copy; AdamW's
    two means in float32, and under ZeRO the master copy. Measured on a tiny model, within 1%:
    float32 16, 20, 20, 16 at ZeRO 0, 1, 2, 3, and bfloat16 16, 16, 14 at ZeRO 1, 2, 3. A critic of
    its own weighs as much again, and a reference that is refreshed another copy of the weights.
    """
    weights = 4 if learner.dtype == "float32" else 2
    copies = 1 if learner.zero_stage == 3 else 2
    trained = copies * weights + (12 if learner.zero_stage else 8)
    critic = learner.critic is not None and not learner.critic.shared
    moved = learner.kl is not None and learner.kl.refresh_every is not None
    return trained * (1 + critic) + weights * moved


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves a number above 1."""
    size, units = float(count), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}"
