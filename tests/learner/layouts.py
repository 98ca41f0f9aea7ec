"""Ranks that save and load checkpoints in every layout, for tests.

A layout is an optimizer, a ZeRO stage and a dtype, and a number of ranks.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import CapturingEngine
from rollouts import random_groups
from safetensors.torch import load_file

from learner.config.learner import LearnerConfig
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from learner.update import Updater

LAYOUTS = [
    *(("adamw", stage, "float32") for stage in (0, 1, 2, 3)),
    *(("adamw", stage, "bfloat16") for stage in (1, 2, 3)),
    *(("muon", stage, "float32") for stage in (0, 1, 2)),
    *(("muon", stage, "bfloat16") for stage in (1, 2)),
]


def updater_of(model_path, layout):
    """Return the updater and the engine of a policy with a value head that has its own rate."""
    optimizer, stage, dtype = layout
    config = LearnerConfig(
        optimizer=optimizer,
        muon_learning_rate=0.02,
        zero_stage=stage,
        dtype=dtype,
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        learning_rate=1e-3,
        gradient_clipping=0.0 if optimizer == "muon" else 1.0,
        advantage="gae",
        loss="ppo",
        critic={"shared": True, "learning_rate": 1e-2},
    )
    policy = load_policy(model_path, LogprobOptions(chunk=64), dtype=dtype, attention="sdpa")
    policy.add_value_head()
    engine = CapturingEngine(
        policy,
        config,
        model_path=model_path,
        zero_stage=stage,
        dtype=dtype,
        total_steps=4,
        rates={"value_head": 1e-2},
    )
    return Updater(engine, config), engine


def train(updater, version):
    """Train the batch of a version, the same whoever calls."""
    updater.update(random_groups(count=5, seed=version, version=version), version)


def folder_of(root, ranks, layout):
    """Return the folder of what a layout saves."""
    return Path(root) / "-".join(map(str, (ranks, *layout)))


def save(rank, model_path, root, layouts):
    """Train two batches and save, then a third and save again."""
    for layout in layouts:
        updater, engine = updater_of(model_path, layout)
        folder = folder_of(root, engine.ranks, layout)
        train(updater, 0)
        train(updater, 1)
        write = engine.capture()
        train(updater, 2)
        write(folder / "before")
        engine.capture()(folder / "after")
        engine.close()


def load(rank, model_path, root, pairs):
    """Load each source in another layout, save it at once, train the third batch, save again.

    `pairs` are folders of sources and layouts to load them in.
    """
    for source, layout in pairs:
        updater, engine = updater_of(model_path, layout)
        source = Path(root) / source
        folder = source / f"in-{folder_of('', engine.ranks, layout)}"
        engine.load(source / "before")
        engine.capture()(folder / "before")
        train(updater, 2)
        assert engine.steps_taken == 3
        engine.capture()(folder / "after")
        engine.close()


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
