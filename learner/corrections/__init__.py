"""Importance weights for what the loss does not correct itself: proximal over behaviour policy.

Weights are detached and multiply the policy loss per token, after its clip and before aggregation;
never a KL, entropy or value term. Bounds are on proximal / behaviour. Denominators stay those of
all tokens: rejected ones count as 0. To average over what is kept instead would need its count over
the whole batch before the first backward pass, so it is left out, as are normalising weights by
their mean and rejecting by rank (M2PO): over one row they would depend on how a batch is packed.
"""

from learner.corrections import by_lag, by_sequence, by_token, rejection
from learner.corrections.registry import (
    CORRECTIONS,
    Correction,
    ImportanceWeights,
    correction,
    importance_weights,
)

__all__ = [
    "CORRECTIONS",
    "Correction",
    "ImportanceWeights",
    "by_lag",
    "by_sequence",
    "by_token",
    "correction",
    "importance_weights",
    "rejection",
]
