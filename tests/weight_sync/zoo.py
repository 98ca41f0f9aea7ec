"""Faults of weights on their way to an engine, after what users of such systems met.

Each takes the weights of the version before and of the version that is stamped, as named in a model
folder, and returns those that the engine serves instead.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.model.logprobs import LogprobOptions
from learner.model.policy import Policy, prepare
from weight_sync.probe import LEARNER, ProbeReport, Sequences

Weights = dict[str, Tensor]
Fault = Callable[[Weights, Weights], Weights]

PROJECTION = re.compile(r"(q|k|v|o|gate|up|down)_proj")


def stepped(weights: Weights, size: float, seed: int, *, only: str = "") -> Weights:
    """Return the weights after a step of `size` relative to each of those whose name has `only`."""
    draw = torch.Generator().manual_seed(seed)

    def step(weight: Tensor) -> Tensor:
        spread = weight.float().pow(2).mean().sqrt()
        moved = weight.float() + size * spread * torch.randn(weight.shape, generator=draw)
        return moved.to(weight.dtype)

    return {name: step(weight) if only in name else weight for name, weight in weights.items()}


def a_layer_left_out(old: Weights, new: Weights) -> Weights:
    return {name: (old if ".layers.1." in name else new)[name] for name in new}


def two_layers_exchanged(old: Weights, new: Weights) -> Weights:
    other = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}

    def source(name: str) -> str:
        return re.sub(r"\.layers\.[01]\.", lambda match: other[match.group()], name)

    return {name: new[source(name)] for name in new}


def a_transposed_matrix(old: Weights, new: Weights) -> Weights:
    name = "model.layers.0.self_attn.o_proj.weight"
    return {**new, name: new[name].T.contiguous()}


def experts_permuted(old: Weights, new: Weights) -> Weights:
    def source(name: str) -> str:
        return re.sub(
            r"experts\.(\d+)\.", lambda match: f"experts.{(int(match[1]) + 1) % 4}.", name
        )

    return {name: new[source(name)] for name in new}


def garbage(old: Weights, new: Weights) -> Weights:
    return {
        name: torch.randn_like(weight) * weight.std() if PROJECTION.search(name) else weight
        for name, weight in new.items()
    }


def a_scale_applied_twice(old: Weights, new: Weights) -> Weights:
    return {name: new[name] + (new[name] - old[name]) for name in new}


def old_weights(old: Weights, new: Weights) -> Weights:
    return old


FAULTS: dict[str, Fault] = {
    "an adapter that never reaches the engines": old_weights,
    "an update of garbage": garbage,
    "an engine that wakes with old weights": old_weights,
    "a layer left out": a_layer_left_out,
    "two layers exchanged": two_layers_exchanged,
    "a transposed matrix": a_transposed_matrix,
    "experts permuted": experts_permuted,
    "a scale applied twice": a_scale_applied_twice,
    "a version stamped one too high": old_weights,
}


class LearnersScores:
    """Scores weights as the learner does: packed, by a policy."""

    def __init__(self, model: Any, sequences: Sequences) -> None:
        policy = Policy(model, LogprobOptions(chunk=64))
        self.policy = prepare(policy, "model", attention="sdpa")
        self.sequences = sequences

    @torch.no_grad()
    def report(self, weights: Weights, version: int) -> ProbeReport:
        load(self.policy.model, weights)
        tokens = torch.tensor([token for sequence in self.sequences for token in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in self.sequences])
        logprobs = self.policy(tokens, positions)[0]
        return ProbeReport(
            source=LEARNER, version=version, sequences=self.sequences,
            scores=tuple(logprobs[positions > 0].tolist()),
        )  # fmt: skip


@torch.no_grad()
def load(model: Any, weights: Weights) -> None:
    """Put weights as named in the folder into a model of transformers, whose experts are fused."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
            continue
        parts = revert_weight_conversion(model, {name: parameter.clone()})
        kinds: dict[str, list[Tensor]] = {}
        for part in parts:
            kinds.setdefault(part.rsplit(".", 2)[-2], []).append(weights[part])
        stacks = [torch.stack(kind) for kind in kinds.values()]
        parameter.copy_(torch.cat(stacks, 1))
