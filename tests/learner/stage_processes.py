"""A stage of supervised training in processes that are ranks of one group, for tests."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import load_rank, settings_of
from safetensors.torch import load_file

from learner.config.supervised import SftConfig
from learner.supervised.sft import Example, batches_of, train_supervised
from learner.supervised.stage import Stage

STEPS = 4
SAVED = 2
"""Step of the checkpoint."""


def examples():
    """Yield examples of 2 to 20 tokens, of which more or fewer are learned, without end."""
    generator = torch.Generator().manual_seed(5)
    while True:
        length = int(torch.randint(2, 21, (), generator=generator))
        token_ids = torch.randint(3, 15, (length,), generator=generator).tolist()
        learned = torch.rand(length, generator=generator) < 0.6
        yield Example(token_ids, learned.tolist())


def heldout():
    """Return an odd number of examples, which two ranks cannot share equally."""
    drawn = examples()
    return [next(drawn) for _ in range(7)]


def trained(model_path, folder, zero_stages):
    """Return by ZeRO stage what training gives, without interruption and from a checkpoint."""
    results = {}
    for zero_stage in zero_stages:
        root = Path(folder) / f"{dist.get_world_size()}-{zero_stage}"
        straight = run(model_path, zero_stage, root)
        [saved] = root.glob("v*")
        results[zero_stage] = straight, run(model_path, zero_stage, root, str(saved))
    return results


def run(model_path, zero_stage, root, saved=None):
    """Return gradient of the first step, losses of the steps and of held-out examples, weights."""
    alike = {"zero_stage": zero_stage, "learning_rate": 1e-3, "epsilon": 1e-3}
    config = SftConfig(
        demonstrations="x", steps=STEPS, batch_tokens=60, microbatch_tokens=24,
        checkpoint_every=SAVED, eval_every=2, heldout=7, **alike,
    )  # fmt: skip
    rank = load_rank(model_path, settings_of(**alike), saved, checkpoints=str(root))
    stage = Stage(
        spec=rank.spec, config=config, train=train_supervised, heldout=heldout(),
        folder=str(root / "model"),
    )  # fmt: skip
    batches = batches_of(examples(), config.batch_tokens)
    for _ in range(SAVED if saved else 0):
        next(batches)
    gradients, losses = [], []
    for row in stage.run(rank, batches):
        gradients.append(rank.engine.gradient)
        losses.append((row.step, row.loss, *(row.heldout or (0, math.nan))))
    weights = load_file(root / "model" / "model.safetensors")
    return {"gradient": gradients[0], "losses": losses, "weights": weights}
