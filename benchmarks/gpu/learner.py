"""The learner's part of the suite: utilisation, and the effective sample size by lag.

Runs where there are PyTorch and transformers (and pydantic, which settings are made of).
"""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.flops import Peak, shape_of, training_flops
from benchmarks.gpu.plain_engine import PlainEngine
from benchmarks.learner_clock import ClockedEngine, timed_update
from benchmarks.train import figures_of
from benchmarks.training_load import SIZES, Size, batch, build, lengths_of
from learner.config import LearnerConfig
from learner.model import Policy
from learner.packed_attention import attend_packed
from learner.update import Updater
from queues.records import RolloutGroup

ATTENTION = ("packed", "masked")
"""Sequence by sequence, as `attention = "sdpa"` is; and with a mask over the row, as transformers
would do that by itself."""
LAGS = 8
LEARNING_RATE = 1e-6
LAG_LEARNING_RATE = 1e-5
"""Large, so that weights that random rewards move can be told apart."""


def make(size: Size, device: torch.device, *, packed: bool, rate: float) -> PlainEngine:
    """A model with random weights on the device, under an optimizer."""
    torch.manual_seed(0)
    with device:
        model = build(size).to(getattr(torch, size.dtype)).eval()
    if packed and not attend_packed(model):
        raise SystemExit("the model cannot attend sequence by sequence")
    return PlainEngine(Policy(model, chunk=1024), learning_rate=rate)


def utilisation(name: str, device: torch.device, *, rounds: int) -> dict[str, Any]:
    """Tokens a second and operations beside the best product, with each kind of attention."""
    size = SIZES[name]
    groups = batch(size, seed=1)
    config = LearnerConfig(microbatch_tokens=size.row_tokens, dtype=size.dtype)
    with torch.device("meta"):
        model = build(size)
    flops = training_flops(shape_of(model), lengths_of(groups))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": parameters, "engine": "torch, without DeepSpeed"}
    peak = Peak(device, getattr(torch, size.dtype))
    for kind in ATTENTION:
        engine = make(size, device, packed=kind == "packed", rate=LEARNING_RATE)
        clocked = ClockedEngine(engine, device)
        updater, timed = Updater(clocked, config), []
        before = 0.0
        for version in range(rounds + 1):
            seconds = timed_update(updater, clocked, lambda: groups, version)
            after = peak.measure()
            if version:  # the first warms up
                timed.append({**seconds, "peak": before, "peak_after": after})
            before = after
        found[kind] = figures_of(timed, flops, sum(lengths_of(groups)))
        if device.type == "cuda":
            found[kind]["bytes"] = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        del engine, clocked, updater
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def sample_size_by_lag(name: str, device: torch.device) -> dict[str, Any]:
    """Effective sample size of batches that version 0 sampled, when later versions train them.

    Tokens are drawn evenly, which is nearly what a model with random weights samples; rewards are
    as good as random. So the shape is told, and not what a task would give.
    """
    size = replace(SIZES[name], groups=4)
    engine = make(size, device, packed=True, rate=LAG_LEARNING_RATE)
    updater = Updater(engine, LearnerConfig(microbatch_tokens=size.row_tokens, dtype=size.dtype))
    batches = [_as_sampled(batch(size, seed=lag), engine) for lag in range(LAGS + 1)]
    keys = ("ess", "ess_sequence", "kl", "mismatch", "ratio_max")
    rows = [updater.update(groups, version) for version, groups in enumerate(batches)]
    return {
        "learning_rate": LAG_LEARNING_RATE,
        "by_lag": [{"lag": row["max_lag"], **{key: row[key] for key in keys}} for row in rows],
    }


@torch.no_grad()
def _as_sampled(groups: list[RolloutGroup], engine: PlainEngine) -> list[RolloutGroup]:
    """The groups with the log-probabilities that the policy gives their tokens now."""
    return [
        replace(
            group,
            rollouts=[
                replace(rollout, behavior_logprobs=_logprobs(rollout, engine))
                for rollout in group.rollouts
            ],
        )
        for group in groups
    ]


def _logprobs(rollout: Any, engine: PlainEngine) -> list[float]:
    tokens = torch.tensor(rollout.token_ids)
    said = engine.forward(tokens, torch.arange(len(tokens))).logprobs
    sampled = torch.tensor(rollout.loss_mask, device=said.device)
    found: list[float] = torch.where(sampled, said, 0.0).tolist()
    return found
