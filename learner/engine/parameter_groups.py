"""The parameters of a module by learning rate, weight decay and optimizer, for DeepSpeed."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from learner.config.optimizer import OptimizerConfig
from learner.model.shared_weights import shape_of

HEADS = ("score.weight", "value_head.weight")
"""Heads of critics, whose updates Muon does not orthogonalise."""


def optimizer_section(config: OptimizerConfig, module: Any) -> dict[str, Any]:
    """Return DeepSpeed's optimizer section; mark the matrices that Muon updates."""
    ends = [module.model.get_input_embeddings(), module.model.get_output_embeddings()]
    outer = {id(end.weight) for end in ends if end is not None}
    for name, parameter in module.named_parameters():
        inner = id(parameter) not in outer and not name.endswith(HEADS)
        parameter.use_muon = config.optimizer == "muon" and parameter.ndim == 2 and inner
    shared = {
        "betas": list(config.betas),
        "eps": config.epsilon,
        "weight_decay": config.weight_decay,
        "torch_adam": True,  # DeepSpeed's own is compiled at first use, and needs a toolchain
    }
    if config.optimizer == "muon":
        rates = {"muon_lr": config.muon_learning_rate, "adam_lr": config.learning_rate}
        return {"type": "Muon", "params": {**rates, **shared, "momentum": 0.95}}
    # Fused: one pass over the state in place of ten.
    return {"type": "AdamW", "params": {"lr": config.learning_rate, **shared, "fused": True}}


def parameter_groups(
    module: nn.Module, config: OptimizerConfig, rates: Mapping[str, float]
) -> list[dict[str, Any]] | None:
    """Return trained parameters by learning rate and weight decay; None where all are one group.

    `rates` are as in `Trainable.adopt`; the names of groups begin with those of their parts.
    """
    only_matrices = config.weight_decay > 0 and config.weight_decay_on == "matrices"
    spared = no_matrices(module) if only_matrices else set()
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    if not (rates or spared) and len(trained) == len(list(module.parameters())):
        return None
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in trained:
        part = next((part for part in rates if name.startswith(part)), "")
        groups.setdefault((part, id(parameter) in spared), []).append(parameter)
    return [
        {"params": groups[part, spares], "name": (part or "rest") + ("-spared" if spares else "")}
        | ({"lr": rates[part]} if part else {})
        | ({"weight_decay": 0.0} if spares else {})
        for part, spares in sorted(groups)
    ]


def no_matrices(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that are norms, biases or embeddings.

    An output layer that shares its weight with the embedding is one too.
    """
    spared = set()
    for owner in module.modules():
        kind = type(owner).__name__.lower()
        whole = isinstance(owner, nn.Embedding) or "norm" in kind
        for name, parameter in owner.named_parameters(recurse=False):
            if whole or len(shape_of(parameter)) < 2 or "bias" in name or "embed" in name:
                spared.add(id(parameter))
    return spared
