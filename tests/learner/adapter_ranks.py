"""Ranks that train an adapter, for tests; results are written by rank 0 with torch.save."""

from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import COMBINATIONS, _rank, go_on
from rollouts import random_groups

from learner.config.learner import LearnerConfig
from learner.engine import checkpoint
from learner.model import lora
from weight_sync.adapter import merged

BUDGETS = (16, 10_000)
OBJECTIVES = {
    "kl": {"kl": {"coefficient": 0.3}},
    "held": {"kl": {"coefficient": 0.3, "reference": "the base"}},
    "shared": {"advantage": "gae", "loss": "dapo", "critic": {"shared": True}},
    "own critic": {"advantage": "gae", "loss": "ppo", "critic": {"lora": {"rank": 4}}},
    "pairs": {"advantage": "best_worst", "loss": "dpo", "aggregation": "sequence_mean"},
    "checkpointing": {"activation_checkpointing": True},
}


def config_of(adapter, **settings):
    return LearnerConfig(ranks=dist.get_world_size(), lora={
        "rank": 4, "alpha": 8.0, "path": adapter,
    }, **settings)  # fmt: skip


def frozen(loaded):
    """Return this rank's part of every weight that is not trained."""
    named = loaded.engine._engine.module.named_parameters()
    return {
        name: getattr(one, "ds_tensor", one).detach().clone()
        for name, one in named
        if not one.requires_grad
    }


def gradients(rank, model_path, adapter, file):
    """Write gradient and statistics of one batch at every ZeRO stage and microbatch budget."""
    results = {}
    for stage in (0, 1, 2, 3):
        for budget in BUDGETS:
            settings = {"zero_stage": stage, "microbatch_tokens": budget}
            loaded = _rank(model_path, config_of(adapter, learning_rate=1e-2, **settings))
            before = frozen(loaded)
            report = loaded.updater.update(random_groups(count=5, size=3), 0)
            after = frozen(loaded)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            state = loaded.engine._engine.basic_optimizer.state.values()
            stepped = sum(one["exp_avg"].numel() for one in state)
            results[stage, budget] = loaded.engine.gradient, report.to_dict(), stepped
            loaded.close()
    if rank == 0:
        torch.save(results, file)


def objectives(rank, model_path, adapter, file):
    """Write gradients and statistics of one batch under several kinds of objective."""
    results = {}
    for name, settings in OBJECTIVES.items():
        if name == "held":
            settings = {"kl": {"coefficient": 0.3, "reference": model_path}}
        for stage, budget in ((0, 10_000), (3, 40)):
            settings = {**settings, "zero_stage": stage, "microbatch_tokens": budget}
            loaded = _rank(model_path, config_of(adapter, **settings))
            report = loaded.updater.update(random_groups(count=5, size=3, version=1), 1)
            results[name, stage] = loaded.engine.gradient, report.to_dict()
            loaded.close()
    if rank == 0:
        torch.save(results, file)


def resumed(rank, model_path, adapter, root, file):
    """Weights and statistics of training on, without interruption and from a checkpoint."""
    results = {}
    for stage, dtype in COMBINATIONS:
        config = config_of(
            adapter, zero_stage=stage, dtype=dtype, learning_rate=1e-2, kl={"coefficient": 0.3}
        )
        folder = Path(root) / f"{stage}-{dtype}"
        straight = go_on(_rank(model_path, config), range(4), rank, folder)
        saved = checkpoint.checkpoint_path(folder, 2)
        again = _rank(model_path, config, checkpoint_path=str(saved))
        results[stage, dtype] = straight, go_on(again, range(2, 4), rank, None)
    if rank == 0:
        torch.save(results, file)


def published(rank, model_path, adapter, file):
    """Write what engines merge of the factors that travel, and what the learner has merged."""
    results = {}
    base = [(w.name, w.value()) for w in lora.weights(_plain(model_path))]
    for stage, dtype in COMBINATIONS:
        config = config_of(adapter, zero_stage=stage, dtype=dtype, learning_rate=1e-2)
        loaded = _rank(model_path, config)
        loaded.updater.update(random_groups(count=5, size=3), 0)
        factors = {name: tensor.clone() for name, tensor in loaded.weights()}
        whole = {name: tensor.clone() for name, tensor in loaded.engine.weights()}
        scale = loaded.published_adapter.scale
        loaded.close()
        results[stage, dtype] = whole, dict(merged(base, factors, scale))
    if rank == 0:
        torch.save(results, file)


def _plain(model_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
