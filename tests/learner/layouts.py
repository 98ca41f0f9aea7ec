"""Ranks that save and load checkpoints in every layout, for tests.

A layout is an optimizer, a ZeRO stage and a dtype, and a number of ranks.
"""

from pathlib import Path

import torch
from rank_processes import load_rank, settings_of
from rollouts import random_groups
from safetensors.torch import load_file

LAYOUTS = [
    *(("adamw", stage, "float32") for stage in (0, 1, 2, 3)),
    *(("adamw", stage, "bfloat16") for stage in (1, 2, 3)),
    *(("muon", stage, "float32") for stage in (0, 1, 2)),
    *(("muon", stage, "bfloat16") for stage in (1, 2)),
]


def rank_of(model_path, layout):
    """Return a rank of a policy with a value head that has its own rate."""
    optimizer, stage, dtype = layout
    config = settings_of(
        optimizer=optimizer,
        muon_learning_rate=0.02,
        zero_stage=stage,
        dtype=dtype,
        learning_rate=1e-3,
        gradient_clipping=0.0 if optimizer == "muon" else 1.0,
        advantage="gae",
        loss="ppo",
        critic={"shared": True, "learning_rate": 1e-2},
    )
    return load_rank(model_path, config)


def train(rank, version):
    """Train the batch of a version, the same whoever calls."""
    rank.updater.update(random_groups(count=5, seed=version, version=version), version)


def folder_of(root, ranks, layout):
    """Return the folder of what a layout saves."""
    return Path(root) / "-".join(map(str, (ranks, *layout)))


def save(model_path, root, layouts):
    """Train two batches and save, then a third and save again."""
    for layout in layouts:
        rank = rank_of(model_path, layout)
        folder = folder_of(root, rank.engine.ranks, layout)
        train(rank, 0)
        train(rank, 1)
        write = rank.engine.capture()
        train(rank, 2)
        write(folder / "before")
        rank.engine.capture()(folder / "after")
        rank.close()


def load(model_path, root, pairs):
    """Load each source in another layout, save it at once, train the third batch, save again.

    `pairs` are folders of sources and layouts to load them in.
    """
    for source, layout in pairs:
        rank = rank_of(model_path, layout)
        engine, source = rank.engine, Path(root) / source
        folder = source / f"in-{folder_of('', engine.ranks, layout)}"
        engine.load(source / "before")
        engine.capture()(folder / "before")
        train(rank, 2)
        assert engine.steps_taken == 3
        engine.capture()(folder / "after")
        rank.close()


def state(folder):
    """Return whole tensors of the weights and the optimizer's state of a checkpoint, flattened."""
    parts = {}
    for path in (folder / "optimizer").glob("*.safetensors"):
        for key, values in load_file(path).items():
            name, _, start = key.rpartition("@")
            parts.setdefault(name, []).append((int(start), values))
    return {
        name: torch.cat([values for _, values in sorted(runs, key=lambda run: run[0])])
        for name, runs in parts.items()
    }
