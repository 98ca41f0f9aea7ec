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

PROJECTION = r"(q|k|v|o|gate|up|down)_proj"


def stepped(weights: Weights, size: float, seed: int) -> Weights:
    """Return the weights after a step of `size` relative to each; what is zero leaves it."""
    draw = torch.Generator().manual_seed(seed)

    def step(weight: Tensor) -> Tensor:
        spread = weight.float().pow(2).mean().sqrt() or 1.0
        moved = weight.float() + size * spread * torch.randn(weight.shape, generator=draw)
        return moved.to(weight.dtype)

    return {name: step(weight) for name, weight in weights.items()}


def old_weights(old: Weights, new: Weights) -> Weights:
    return old


def kept(pattern: str) -> Fault:
    """Return a fault that leaves what matches the pattern at the version before."""
    return lambda old, new: {name: (old if re.search(pattern, name) else new)[name] for name in new}


def exchanged(pattern: str, one: str, other: str) -> Fault:
    """Return a fault that exchanges weights whose names differ by one part, where all fit."""

    def source(name: str) -> str:
        if not re.search(pattern, name):
            return name
        return re.sub(f"{one}|{other}", lambda m: one if m[0] == other else other, name)

    return lambda old, new: {name: new[source(name)] for name in new}


def altered(pattern: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault that changes each tensor whose name matches the pattern."""
    return lambda old, new: {
        name: change(weight).contiguous() if re.search(pattern, name) else weight
        for name, weight in new.items()
    }


def experts_permuted(old: Weights, new: Weights) -> Weights:
    def source(name: str) -> str:
        return re.sub(
            r"experts\.(\d+)\.", lambda match: f"experts.{(int(match[1]) + 1) % 4}.", name
        )

    return {name: new[source(name)] for name in new}


def a_scale_applied_twice(old: Weights, new: Weights) -> Weights:
    return {name: new[name] + (new[name] - old[name]) for name in new}


def half_of_each_kept(old: Weights, new: Weights) -> Weights:
    halves = {name: len(weight) // 2 for name, weight in new.items()}
    return {name: torch.cat([new[name][:n], old[name][n:]]) for name, n in halves.items()}


def changes(served: Weights, new: Weights) -> bool:
    """Return True unless the fault is of tensors that the model lacks."""
    return not all(torch.equal(served[name], new[name]) for name in new)


def rounded(weight: Tensor) -> Tensor:
    """Round to the next smaller dtype and back."""
    smaller = torch.bfloat16 if weight.dtype == torch.float32 else torch.float8_e4m3fn
    return weight.to(smaller).to(weight.dtype)


FIRST = r"layers\.0\."
FAULTS: dict[str, Fault] = {
    "an adapter that never reaches the engines": old_weights,
    "an update of garbage": altered(PROJECTION, lambda it: torch.randn_like(it) * it.std()),
    "an engine that wakes with old weights": old_weights,
    "a layer left out": kept(r"layers\.1\."),
    "two layers exchanged": exchanged("", r"layers.0.", r"layers.1."),
    "a transposed matrix": altered(FIRST + r"self_attn\.o_proj", lambda it: it.T),
    "experts permuted": experts_permuted,
    "a scale applied twice": a_scale_applied_twice,
    "a version stamped one too high": old_weights,
    "half of each tensor kept": half_of_each_kept,
    "the norms of a layer kept": kept(FIRST + r".*norm"),
    "the last norm kept": kept(r"^model\.norm"),
    "embeddings kept": kept("embed_tokens"),
    "embeddings a row too low": altered("embed_tokens", lambda it: it.roll(1, 0)),
    "a head that is not tied kept": kept("lm_head"),
    "the router of a layer kept": kept(FIRST + r"mlp\.gate\."),
    "one expert kept": kept(FIRST + r".*experts\.2\."),
    "biases left out": altered(r"bias$", torch.zeros_like),
    "two heads of queries exchanged": altered(
        FIRST + r".*q_proj", lambda it: torch.cat([it[32:64], it[:32], it[64:]])
    ),
    "two heads of keys and values exchanged": altered(
        FIRST + r".*(k|v)_proj", lambda it: it.roll(32, 0)
    ),
    "keys and values exchanged": exchanged(FIRST + r".*_proj\.weight", "k_proj", "v_proj"),
    "gate and up exchanged": exchanged(FIRST, "gate_proj", "up_proj"),
    "halves of heads interleaved": altered(
        FIRST + r".*(q|k)_proj\.weight",
        lambda it: it.view(-1, 2, 16, 128).transpose(1, 2).reshape(it.shape),
    ),
    "weights rounded on the way": altered("", rounded),
    "a matrix of zeros": altered(FIRST + r".*o_proj", torch.zeros_like),
    "a matrix that is no number": altered(FIRST + r".*o_proj", lambda it: it * torch.nan),
    "the sign of a norm": altered(FIRST + "input_layernorm", torch.neg),
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
