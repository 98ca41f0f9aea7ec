"""Limits of what ZeRO reduces, and of what its stage 3 gathers of a model, at a time."""

from torch import nn

from learner.model.shared_weights import shape_of

BUCKET_ELEMENTS = 100_000_000
"""Gradients that ZeRO reduces at once. DeepSpeed allocates memory for all of them in every backward
pass, so that models of fewer weights get a smaller bucket."""
PERSISTENT_ELEMENTS = 10_000
"""Tensors with fewer elements stay whole on every rank under ZeRO 3."""
LIVE_ELEMENTS = 1_000_000_000
"""Weights that ZeRO 3 keeps gathered while it computes, at most a twentieth of the model."""


def overlaps(zero_stage: int, ranks: int, trained: int) -> bool:
    """Return True if ranks sum a bucket of gradients while the next one fills, in a second buffer.

    Stage 3 does so by itself, and stage 1 sums after the backward pass.
    """
    return zero_stage == 2 and ranks > 1 and trained > BUCKET_ELEMENTS


def elements(module: nn.Module, *, trained: bool = False) -> int:
    """Return how many weights a module has, or only those with gradients."""
    return sum(
        shape_of(parameter).numel()
        for parameter in module.parameters() if parameter.requires_grad or not trained
    )  # fmt: skip


def live_elements(count: int) -> int:
    """Return how many weights ZeRO 3 keeps gathered of a module with so many."""
    return min(LIVE_ELEMENTS, count // 20)


def gathering(count: int) -> dict[str, int]:
    """Return how much ZeRO 3 gathers of a module with so many weights."""
    live = live_elements(count)
    return {
        "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        "stage3_prefetch_bucket_size": live // 2,
    }
